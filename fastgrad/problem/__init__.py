"""A function and its inputs as one map from R^n to R^m, evaluated and differentiated."""
