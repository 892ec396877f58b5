"""The checks of the contract, one file a chapter."""
