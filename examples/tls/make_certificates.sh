#!/bin/sh
# Certificates for a first try: make_certificates.sh [FOLDER]
# One authority for the services, ca.crt, and another for what clients see, edge-ca.crt. Names of hosts that clients use go into
# EDGE_NAMES: EDGE_NAMES="DNS:llm.example.org" make_certificates.sh
set -eu
cd "$(mkdir -p "${1:-.}" && cd "${1:-.}" && pwd)"
umask 077

authority() { # NAME
  openssl ecparam -name prime256v1 -genkey -noout -out "$1.key"
  openssl req -x509 -new -key "$1.key" -subj "/CN=penstock $1" -days 365 -out "$1.crt"
}

certificate() { # NAME AUTHORITY SUBJECT_ALTERNATIVE_NAMES
  openssl ecparam -name prime256v1 -genkey -noout -out "$1.key"
  openssl req -new -key "$1.key" -subj "/CN=$1" -addext "subjectAltName=$3" |
    openssl x509 -req -CA "$2.crt" -CAkey "$2.key" -CAcreateserial -days 30 -copy_extensions copy -out "$1.crt"
}

authority ca
for name in penstock-frontend penstock-enginecore penstock-coordinator penstock-operator penstock-scaler; do
  certificate "$name" ca "DNS:$name"
done
authority edge-ca
certificate edge edge-ca "DNS:localhost,IP:127.0.0.1${EDGE_NAMES:+,$EDGE_NAMES}"
