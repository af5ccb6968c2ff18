"""Nothing is public: the module is used from `_core` only."""
