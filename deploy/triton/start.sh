#!/bin/sh
# Becomes tritonserver with the given flags and the restricted APIs, after checking what it needs. Runs in the container.
#
# NOTE: tritonserver takes the key on its command line only. So `ps` shows it, inside the container and, to those who
# may see other users' processes, on the host (`docker top`). Keep untrusted users off that machine.
set -eu

repository=${TRITONPILOT_REPOSITORY:-/models}
key_file=${TRITONPILOT_CONTROL_KEY_FILE:-/run/secrets/triton_control_key}
restricted=model-repository,shared-memory,trace,logging
header=tritonpilot-control-key

refuse() {
    echo "start.sh: $1" >&2
    exit 1
}

unreadable=$(find -L "$repository" ! -readable -print -quit 2>/dev/null || true)
[ -z "$unreadable" ] || refuse "$unreadable cannot be read by the server's user ($(id -u)). tritonserver was not started. \
Make the model repository readable: chmod -R a+rX model_repository"

unbuilt=
models=0
for config in "$repository"/*/config.pbtxt; do
    [ -e "$config" ] || continue
    models=$((models + 1))
    folder=${config%/config.pbtxt}
    ls -d "$folder"/[1-9]*/ >/dev/null 2>&1 || unbuilt="$unbuilt ${folder##*/}"
done
[ "$models" -gt 0 ] || refuse "The model repository mounted at $repository holds no model. tritonserver was not started. \
Run \`tritonpilot build --prepare\` in the project's folder, then \`docker compose up\` again."
[ -z "$unbuilt" ] || refuse "The model repository holds a config.pbtxt but no version folder for:$unbuilt. These models were \
not built yet, and tritonserver was not started. Run \`tritonpilot build --prepare\` in the project's folder, then \
\`docker compose up\` again."

[ -r "$key_file" ] || refuse "There is no key for the restricted APIs: $key_file is missing or unreadable. tritonserver was \
not started. Set TRITONPILOT_CONTROL_KEY in the environment or in .env beside docker-compose.yml."
key=$(cat "$key_file")
case $key in
'' | *[!A-Za-z0-9._~+/-]*) usable=no ;;
*) usable=yes ;;
esac
if [ "$usable" = no ] || [ "${#key}" -lt 16 ] || [ "${#key}" -gt 256 ]; then
    refuse "TRITONPILOT_CONTROL_KEY is no usable key: 16 to 256 letters, digits or . _ ~ + / - are needed. tritonserver was \
not started. Make one with: openssl rand -hex 32"
fi

exec tritonserver "--model-repository=$repository" \
    "--http-restricted-api=$restricted:$header=$key" "--grpc-restricted-protocol=$restricted:$header=$key" "$@"
