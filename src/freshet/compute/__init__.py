"""Where training runs. An executor takes work and gives futures; swapping it never changes a result."""
