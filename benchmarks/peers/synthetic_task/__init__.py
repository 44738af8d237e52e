"""FLGo's form of the work: a benchmark is a package with a module ``core``."""
