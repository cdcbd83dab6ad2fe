"""fastgrad in test suites: replacing torch's checkers, and the pytest plugin."""
