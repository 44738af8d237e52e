"""``python -m freshet`` is the ``freshet`` command."""

from freshet.cli import main

main()
