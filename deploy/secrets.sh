#!/bin/sh
# Makes the secrets of docker-compose.yml that are not there yet.
#
#     deploy/secrets.sh [FOLDER]           default: ./secrets of the project
#
# triton_control_key      key of Triton's restricted APIs; TRITONPILOT_CONTROL_KEY where that is set
# grafana_admin_password  password of Grafana's user admin
# alert_webhook_url       where Alertmanager sends alerts; nobody listens at the one that is written here
#
# Other users cannot enter the folder (mode 0700). The files in it can be read by all (0644), because Docker mounts them with
# their owner and mode, and containers' users are not the one who calls this.
set -eu
if [ -n "${TRITONPILOT_CONTROL_KEY:-}" ]; then
    case $TRITONPILOT_CONTROL_KEY in
    *[!A-Za-z0-9._~+/-]*) usable=no ;;
    *) usable=yes ;;
    esac
    if [ "$usable" = no ] || [ "${#TRITONPILOT_CONTROL_KEY}" -lt 16 ] || [ "${#TRITONPILOT_CONTROL_KEY}" -gt 256 ]; then
        echo "secrets.sh: TRITONPILOT_CONTROL_KEY is no usable key: 16 to 256 letters, digits or . _ ~ + / - are needed. \
Nothing was made. Unset it, and a key is made." >&2
        exit 1
    fi
fi
folder=${1:-$(dirname "$0")/../secrets}
umask 077
mkdir -p "$folder"
chmod 700 "$folder"
folder=$(cd "$folder" && pwd)

random() { od -An -v -tx1 -N32 /dev/urandom | tr -d ' \n'; }

keep() { # NAME VALUE
    if [ -e "$folder/$1" ]; then
        echo "$folder/$1 is there"
    else
        printf '%s' "$2" >"$folder/.$1.$$"
        chmod 644 "$folder/.$1.$$"
        mv "$folder/.$1.$$" "$folder/$1" # whole at once
        echo "$folder/$1 made"
    fi
}

keep triton_control_key "${TRITONPILOT_CONTROL_KEY:-$(random)}"
keep grafana_admin_password "$(random)"
keep alert_webhook_url http://127.0.0.1:9/
