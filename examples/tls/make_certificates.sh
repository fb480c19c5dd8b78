#!/bin/sh
# A certificate authority and a certificate per service, for a first try: make_certificates.sh [FOLDER]
# Names of hosts that clients use go into EDGE_NAMES: EDGE_NAMES="DNS:llm.example.org" make_certificates.sh
set -eu
cd "$(mkdir -p "${1:-.}" && cd "${1:-.}" && pwd)"
umask 077
openssl ecparam -name prime256v1 -genkey -noout -out ca.key
openssl req -x509 -new -key ca.key -subj "/CN=penstock CA" -days 365 -out ca.crt
for name in penstock-frontend penstock-enginecore penstock-coordinator penstock-operator; do
  openssl ecparam -name prime256v1 -genkey -noout -out "$name.key"
  names="subjectAltName=DNS:$name,DNS:localhost,IP:127.0.0.1${EDGE_NAMES:+,$EDGE_NAMES}"
  openssl req -new -key "$name.key" -subj "/CN=$name" -addext "$names" |
    openssl x509 -req -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -copy_extensions copy -out "$name.crt"
done
