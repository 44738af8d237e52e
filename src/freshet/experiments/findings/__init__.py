"""What runs that were kept say, as a page with pictures: ``freshet paper results``."""
