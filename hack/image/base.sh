#!/bin/sh
# Make the local base image, for machines without a container registry: Debian minbase, python3 and
# CA certificates, through the host's own apt settings. Does nothing when the image is there.
# Usage: hack/image/base.sh [suite] [image]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
suite=${1:-bookworm} image=${2:-localhost/outrider-base:$suite}
home=${OUTRIDER_HOME:-$HOME/.cache/outrider}
mkdir -p "$home"
exec 9>"$home/base.lock"; flock 9        # two clones may build at once
if "$here/buildah" inspect --type image "$image" >/dev/null 2>&1; then exit 0; fi

"$here/packages"
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-0} mmdebstrap --quiet --variant=minbase --format=tar \
  --include=python3,ca-certificates \
  --aptopt='APT::Install-Recommends "false"' \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
  --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/info/*' \
  --customize-hook='rm -rf "$1"/var/cache/apt/*.bin "$1"/var/log/*' \
  "$suite" "$work/base.tar"
container=$("$here/buildah" from scratch)
"$here/buildah" add -q "$container" "$work/base.tar" / >/dev/null
"$here/buildah" config --cmd python3 --env LANG=C.UTF-8 \
  --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
"$here/buildah" commit -q --rm "$container" "$image"
