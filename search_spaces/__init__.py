"""Search spaces, one file an operation; both families read them."""
