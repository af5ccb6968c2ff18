"""C interface of the recount: none, its functions are Python."""
