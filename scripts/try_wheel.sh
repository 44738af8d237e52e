#!/usr/bin/env bash
# Install a wheel as a stranger would, into an empty environment without constraints, and use it outside the clone.
# Downloads all dependencies, torch among them. usage: scripts/try_wheel.sh dist/NAME.whl
set -euo pipefail
wheel=$(realpath "${1:?usage: scripts/try_wheel.sh dist/NAME.whl}")
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
unset PYTHONPATH

"${PYTHON:-python3}" -m venv environment
environment/bin/python -m pip install --disable-pip-version-check "$wheel"
environment/bin/python -m pip check

export PATH="$place/environment/bin:$PATH"
python - "$place" <<'PYTHON'
import sys
from pathlib import Path

import freshet

assert Path(freshet.__file__).is_relative_to(sys.argv[1]), f"{freshet.__file__} is not the installed one"
PYTHON
freshet --version
freshet methods >/dev/null
freshet run --method fedasmu --until 60 --seed 1 --out runs/try
freshet audit runs/try
freshet report runs/try --out report.html
test -s report.html
echo "$(basename "$wheel"): installed and used"
