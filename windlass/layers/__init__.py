"""The only modules that own weights, and what is built of them."""
