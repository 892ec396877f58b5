"""conformance: the acceptance gate for state-dict adapters and checkpoint managers."""
