"""After a failure: experiments, and the probable causes that they tell of."""
