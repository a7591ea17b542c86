#!/bin/sh
# Becomes haproxy with haproxy.cfg, after checking the files that it needs. Runs in the container, and by hand.
#
#     BALANCER_HTTP_A=... deploy/balancer/start.sh [CONFIG]
#
# The key of the health checks (BALANCER_PROBE_KEY) may be in a file, as a secret is: BALANCER_PROBE_KEY_FILE.
set -eu
config=${1:-$(dirname "$0")/haproxy.cfg}

refuse() {
    echo "start.sh: $1 The balancer was not started. $2" >&2
    exit 1
}

for variable in BALANCER_HTTP_A BALANCER_GRPC_A BALANCER_HTTP_B BALANCER_GRPC_B; do
    eval "server=\${$variable:-}"
    case ${server##*:} in
    "$server" | '' | *[!0-9]*) # without a port haproxy would take the one that the caller has used
        refuse "$variable is '$server', but must be host:port of a Triton or an entry." "As triton:8000." ;;
    esac
done
for variable in BALANCER_MAX_REQUEST_BYTES BALANCER_MAX_REFUSALS; do
    eval "number=\${$variable:-}"
    case $number in
    *[!0-9]*) refuse "$variable is '$number', but must be a whole number." "Give digits only, or unset the variable." ;;
    esac
done
for variable in BALANCER_TLS_CERT BALANCER_CLIENT_CA BALANCER_CLIENT_CRL BALANCER_PROBE_KEY_FILE; do
    eval "file=\${$variable:-}"
    [ -z "$file" ] || [ -f "$file" ] || refuse "$variable is $file, which is no file." "Name a file that is there, or unset the variable."
    [ -z "$file" ] || [ -r "$file" ] || refuse "$variable is $file, which user $(id -u) cannot read." "Change its mode or owner."
    case $file in
    *[[:space:]]*) refuse "$variable is '$file', which has a space in it." "Rename the file." ;;
    esac
done
if [ -n "${BALANCER_TLS_CERT:-}" ]; then
    grep -q -e '-----BEGIN CERTIFICATE-----' "$BALANCER_TLS_CERT" ||
        refuse "$BALANCER_TLS_CERT holds no certificate." "Put certificate chain and key into that one PEM file."
    grep -q -e '-----BEGIN .*PRIVATE KEY-----' "$BALANCER_TLS_CERT" ||
        refuse "$BALANCER_TLS_CERT holds no private key." "Put certificate chain and key into that one PEM file."
fi
if [ -n "${BALANCER_CLIENT_CRL:-}" ]; then # haproxy takes any PEM file, and would then let in nobody
    grep -q -e '-----BEGIN X509 CRL-----' "$BALANCER_CLIENT_CRL" ||
        refuse "$BALANCER_CLIENT_CRL holds no list of revoked certificates." "Make one: openssl ca -gencrl"
fi
if [ -n "${BALANCER_PROBE_MODEL:-}" ] && [ -z "${BALANCER_PROBE_BODY:-}" ]; then
    refuse "BALANCER_PROBE_MODEL is set and BALANCER_PROBE_BODY is not." "Make it with deploy/balancer/probe.py."
fi
if [ -n "${BALANCER_PROBE_KEY_FILE:-}" ]; then
    BALANCER_PROBE_KEY=$(cat "$BALANCER_PROBE_KEY_FILE")
    export BALANCER_PROBE_KEY
fi

# -db: in the foreground. haproxy itself reads certificate, key, CA and CRL, and says which of them it cannot use.
exec haproxy -db -f "$config"
