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
not started. Run deploy/secrets.sh in the project's folder, which makes secrets/triton_control_key."
key=$(cat "$key_file")
case $key in
'' | *[!A-Za-z0-9._~+/-]*) usable=no ;;
*) usable=yes ;;
esac
if [ "$usable" = no ] || [ "${#key}" -lt 16 ] || [ "${#key}" -gt 256 ]; then
    refuse "$key_file is no usable key: 16 to 256 letters, digits or . _ ~ + / - are needed. tritonserver was not started. \
Delete secrets/triton_control_key, and run deploy/secrets.sh in the project's folder."
fi

# Spans go to this OTLP/HTTP receiver, of requests that bring a trace context; the rates of models are set once the server answers.
if [ -n "${OTEL_EXPORTER_OTLP_TRACES_ENDPOINT:-}" ]; then
    set -- --trace-config=mode=opentelemetry "--trace-config=opentelemetry,url=$OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" \
        --trace-config=level=TIMESTAMPS --trace-config=rate=0 "$@"
    # NOTE: in a subshell, so that it is no child of tritonserver, which would not reap it.
    (python3 "$(dirname "$0")/trace_rates.py" "http://127.0.0.1:8000" "$key_file" &)
fi

exec tritonserver "--model-repository=$repository" \
    "--http-restricted-api=$restricted:$header=$key" "--grpc-restricted-protocol=$restricted:$header=$key" "$@"
