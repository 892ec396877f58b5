"""The command line: one small file a verb."""


def main() -> int:
    raise SystemExit("not built yet")
