"""The paper's evaluation: its cells, suites, claims and published numbers, its theorem, and the page of results."""
