#!/bin/sh
# Runs COMMAND with a Docker engine: the one that answers already, else one that is started for it and stopped after it.
#
#     tests/e2e/engine.sh FOLDER COMMAND [ARGUMENT...]
#
# FOLDER keeps the images of the engine that is started (2 GB for those of stand_in_images.sh), and nothing else: what an
# interrupted run left is removed at the next start. Starting one needs root and dockerd (Debian: apt-get install
# --no-install-recommends docker.io). Exits with the command's code, or 69 without an engine.
set -eu
folder=$1
shift

if docker info >/dev/null 2>&1; then exec "$@"; fi

unavailable() {
    echo "engine.sh: $1 Nothing was run." >&2
    exit 69
}
command -v docker >/dev/null || unavailable "There is no docker command here. Install Docker (Debian: apt-get install docker.io)."
command -v dockerd >/dev/null || unavailable "No Docker engine answers, and there is no dockerd to start one."
[ "$(id -u)" -eq 0 ] || unavailable "No Docker engine answers, and only root can start one: systemctl start docker."

mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
sockets=$(mktemp -d) # a socket's path must be short
engine=
stop() {
    if [ -n "$engine" ]; then kill "$engine" 2>/dev/null && wait "$engine" || true; fi
    rm -rf "$sockets"
}
trap stop EXIT
trap 'exit 130' INT TERM
dockerd --data-root "$folder/data" --exec-root "$sockets/exec" --pidfile "$sockets/pid" --host "unix://$sockets/docker.sock" \
    >"$folder/dockerd.log" 2>&1 &
engine=$!
export DOCKER_HOST="unix://$sockets/docker.sock"
waited=0
until docker info >/dev/null 2>&1; do
    kill -0 "$engine" 2>/dev/null || unavailable "dockerd ended: $(tail -n 1 "$folder/dockerd.log")"
    [ "$waited" -lt 60 ] || unavailable "dockerd does not answer after 60 s; see $folder/dockerd.log."
    sleep 1
    waited=$((waited + 1))
done
docker ps --all --quiet | xargs --no-run-if-empty docker rm --force --volumes >/dev/null
docker network prune --force >/dev/null
docker volume prune --force >/dev/null
"$@"
