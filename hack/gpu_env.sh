# Sourced by the GPU scripts: PYTHON and PYTHONPATH. A machine without a package index may lack some of what the server
# imports (pydantic, aiohttp, jinja2, prometheus-client, gguf): wheels that lie in .wheels/ are unpacked and imported.
PYTHON=${PYTHON:-python3}
export PYTHONPATH=operator:runtime:.
if compgen -G '.wheels/*.whl' >/dev/null; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    for wheel in .wheels/*.whl; do "$PYTHON" -m zipfile -e "$wheel" "$site"; done
    PYTHONPATH+=:$site
fi
