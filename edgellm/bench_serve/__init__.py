"""`edgellm bench serve`: a workload against an engine in this process, as its callers see it."""
