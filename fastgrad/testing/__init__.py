"""fastgrad in test suites: torch's checkers forwarded, the pytest plugin."""
