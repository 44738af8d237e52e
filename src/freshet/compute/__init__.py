"""Where training runs. An executor takes work and returns futures. The choice of executor never changes a result."""
