"""The functions that users call: keywords in, reports or errors out."""
