#!/bin/sh
# Becomes haproxy with haproxy.cfg and its servers, after checking the files that it needs. Runs in the container, and by hand.
#
#     BALANCER_SERVERS="10.0.0.1:8000:8001 10.0.0.2:8000:8001 10.0.0.3:8000:8001" deploy/balancer/start.sh [CONFIG]
#
# The key of the health checks (BALANCER_PROBE_KEY) may be in a file, as a secret is: BALANCER_PROBE_KEY_FILE.
set -euf
config=${1:-$(dirname "$0")/haproxy.cfg}

refuse() {
    echo "start.sh: $1 The balancer was not started. $2" >&2
    exit 1
}

is_number() {
    case $1 in
    '' | *[!0-9]*) return 1 ;;
    esac
}

is_host() { # a name, an IPv4 address, or an IPv6 one in brackets
    case $1 in
    \[*[!0-9A-Fa-f:.]*\]) return 1 ;;
    \[*:*\]) ;;
    '' | *[!A-Za-z0-9_.-]*) return 1 ;;
    esac
}

http_servers='' grpc_servers='' names=' '
newline='
'
for server in ${BALANCER_SERVERS:-}; do
    host=${server%:*:*} ports=${server#"${server%:*:*}"}
    http=${ports#:} grpc=${ports##*:}
    http=${http%:*}
    # Without a port haproxy would take the one that the caller has used.
    is_number "$http" && is_number "$grpc" && is_host "$host" ||
        refuse "BALANCER_SERVERS has '$server', but each must be host:HTTP port:gRPC port of a Triton or an entry." "As triton:8000:8001."
    name=$(printf %s "$host:$http" | tr -d '[]')
    case $names in
    *" $name "*) refuse "BALANCER_SERVERS has $host:$http twice." "Name each server once." ;;
    esac
    names="$names$name "
    http_servers="$http_servers    server $name $host:$http$newline"
    grpc_servers="$grpc_servers    server $name $host:$grpc track http_servers/$name$newline"
done
[ -n "$http_servers" ] || refuse "BALANCER_SERVERS is not set." "Name the servers, each as host:HTTP port:gRPC port: triton:8000:8001."
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

text=''
while IFS= read -r line || [ -n "$line" ]; do
    case $line in
    *@http_servers@*) text=$text$http_servers ;;
    *@grpc_servers@*) text=$text$grpc_servers ;;
    *) text=$text$line$newline ;;
    esac
done <"$config"

# -db: in the foreground. haproxy itself reads certificate, key, CA and CRL, and says which of them it cannot use. The config comes
# by a pipe: the container's root cannot be written.
exec haproxy -db -f /dev/stdin <<EOF
$text
EOF
