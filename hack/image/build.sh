#!/bin/sh
# Build images with buildah, as root, without a container engine or a daemon.
# Usage: hack/image/build.sh operator|runtime[=IMAGE]... [more `buildah bud` arguments...]
#   BASE        base image (default: the local one that base.sh makes)
#   BUILD_ENV   shell file of exports for the builder (default: made from the host's pip, uv and proxy settings)
#   TORCH       torch.txt or torch-cpu.txt, runtime only (default: what this machine can use)
#   CA_BUNDLE   PEM bundle for the builder (default: the host's)
set -eu
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
targets=
while [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; do targets="$targets $1"; shift; done
[ -n "$targets" ] || { echo "which image? operator, runtime or both" >&2; exit 2; }
"$here/packages"
. "$here/torch-set"
if [ -z "${BASE:-}" ]; then
  BASE=localhost/outrider-base:bookworm
  "$here/base.sh" bookworm "$BASE"
fi

private=$(mktemp -d); trap 'rm -rf "$private"' EXIT        # mktemp -d: readable by its owner only
if [ -z "${BUILD_ENV:-}" ]; then
  BUILD_ENV=$private/build_env
  "$here/build-env" > "$BUILD_ENV"
fi
if [ -z "${CA_BUNDLE:-}" ]; then
  CA_BUNDLE=${PIP_CERT:-${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}}
fi
if [ ! -r "$CA_BUNDLE" ]; then
  CA_BUNDLE=$private/no_ca_bundle; : > "$CA_BUNDLE"
fi

build() {  # TARGET IMAGE [ARGUMENT...]
  name=$1 as=$2; shift 2
  "$here/buildah" bud --isolation chroot --network host --layers --format oci --pull-never \
    --ignorefile .dockerignore --build-arg BASE="$BASE" \
    --secret id=build_env,src="$BUILD_ENV" --secret id=ca_bundle,src="$CA_BUNDLE" \
    --target "$name" -t "$as" "$@" .
}
home=${OUTRIDER_HOME:-$HOME/.cache/outrider}
exec 9>"$home/image.lock"; flock 9        # clearing must not meet another clone's half-built image
build tools localhost/outrider-tools:dev  # named, so that clearing leaves it
for wanted in $targets; do
  target=${wanted%%=*} image=localhost/outrider-$target:dev torch=
  [ "$wanted" = "$target" ] || image=${wanted#*=}
  [ "$target" != runtime ] || torch="--build-arg=TORCH=$TORCH"
  # shellcheck disable=SC2086  # nothing, or one word
  build "$target" "$image" $torch "$@"
done
"$here/buildah" rmi --prune >/dev/null 2>&1 || :  # what only older builds used: gigabytes when the requirements change
