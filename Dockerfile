# Outrider's two images: --target operator and --target runtime.
# Built by `buildah bud` (hack/image/build.sh); it asks for nothing that `docker build` with BuildKit lacks, but
# that has not been tried. Registry settings come in as build secrets (hack/image/with-build-env): no host name
# is in this file, in a layer or in the history.
ARG BASE=python:3.12-slim

# --- tools: uv, pinned; final stages mount it, none holds it ------------------------------------
FROM ${BASE} AS tools
ARG UV_VERSION=0.13.9
COPY --chmod=0755 hack/image/with-build-env /opt/uv/with-build-env
RUN --mount=type=secret,id=build_env --mount=type=secret,id=ca_bundle \
    export PATH=/opt/uv:$PATH; \
    if ! python3 -m pip --version >/dev/null 2>&1; then \
      with-build-env apt-get update -q && \
      with-build-env apt-get install -q -y --no-install-recommends python3-pip; \
    fi \
 && with-build-env python3 -m pip install -q --no-cache-dir --disable-pip-version-check \
      --root-user-action=ignore --target /opt/uv "uv==${UV_VERSION}"
# A last step of its own: buildah 1.28 shows a stage that is wholly cached without its last step.
ENV OUTRIDER_STAGE=tools

# --- common ground of the final images ----------------------------------------------------------
FROM ${BASE} AS common
# torch makes its cache folder on import: writable for whatever user the pod runs as.
# The app's folder is on the path by one .pth line, so a pod can mount a source tree over it.
RUN mkdir -p /opt/outrider /models /var/cache/outrider && chmod 1777 /var/cache/outrider
ENV PATH=/opt/venv/bin:$PATH HOME=/var/cache/outrider USER=outrider \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

# --- operator -----------------------------------------------------------------------------------
FROM common AS operator
COPY requirements/operator.txt /opt/requirements/
RUN --mount=type=secret,id=build_env --mount=type=secret,id=ca_bundle \
    --mount=type=bind,from=tools,source=/opt/uv,target=/opt/uv \
    --mount=type=cache,id=uv,target=/root/.cache/uv \
    export PATH=/opt/uv:/opt/uv/bin:$PATH UV_CACHE_DIR=/root/.cache/uv UV_LINK_MODE=copy \
           UV_COMPILE_BYTECODE=1 UV_PYTHON_DOWNLOADS=never \
 && uv venv -q --python python3 /opt/venv \
 && with-build-env uv pip install -q --python /opt/venv/bin/python --no-deps \
      -r /opt/requirements/operator.txt \
 && echo /opt/outrider > "$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outrider.pth"
USER 65532:65532
ENTRYPOINT ["python", "-m", "outrider_operator"]
# Last, so that changed code makes one layer anew and no step after it.
COPY --chmod=0755 operator/outrider_operator /opt/outrider/outrider_operator

# --- runtime ------------------------------------------------------------------------------------
FROM common AS runtime
# Triton compiles a small C module on its first use on a GPU: gcc and Python.h.
ARG WITH_CC=1
RUN --mount=type=secret,id=build_env --mount=type=secret,id=ca_bundle \
    --mount=type=bind,from=tools,source=/opt/uv,target=/opt/uv \
    if [ "$WITH_CC" = 1 ]; then \
      /opt/uv/with-build-env apt-get update -q && \
      /opt/uv/with-build-env apt-get install -q -y --no-install-recommends gcc libc6-dev \
        $(test -e /usr/bin/python3 && echo libpython3-dev) && \
      rm -rf /var/lib/apt/lists/* /var/cache/apt/*; \
    fi
# torch.txt: torch, its CUDA libraries, Triton. torch-cpu.txt: the fewest of them that still import.
# What only a linker or a debugger reads is 0.45 GB: static libraries, and Triton's debug information.
ARG TORCH=torch.txt
COPY requirements/${TORCH} /opt/requirements/torch.txt
RUN --mount=type=secret,id=build_env --mount=type=secret,id=ca_bundle \
    --mount=type=bind,from=tools,source=/opt/uv,target=/opt/uv \
    --mount=type=cache,id=uv,target=/root/.cache/uv \
    export PATH=/opt/uv:/opt/uv/bin:$PATH UV_CACHE_DIR=/root/.cache/uv UV_LINK_MODE=copy \
           UV_COMPILE_BYTECODE=1 UV_PYTHON_DOWNLOADS=never \
 && uv venv -q --python python3 /opt/venv \
 && with-build-env uv pip install -q --python /opt/venv/bin/python --no-deps \
      -r /opt/requirements/torch.txt \
 && find /opt/venv -name '*.a' -delete \
 && if command -v strip >/dev/null; then strip --strip-debug /opt/venv/lib/python3*/site-packages/triton/_C/*.so; fi \
 && echo /opt/outrider > "$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outrider.pth"
COPY requirements/runtime.txt /opt/requirements/
RUN --mount=type=secret,id=build_env --mount=type=secret,id=ca_bundle \
    --mount=type=bind,from=tools,source=/opt/uv,target=/opt/uv \
    --mount=type=cache,id=uv,target=/root/.cache/uv \
    export PATH=/opt/uv:/opt/uv/bin:$PATH UV_CACHE_DIR=/root/.cache/uv UV_LINK_MODE=copy \
           UV_COMPILE_BYTECODE=1 UV_PYTHON_DOWNLOADS=never \
 && with-build-env uv pip install -q --python /opt/venv/bin/python --no-deps \
      -r /opt/requirements/runtime.txt
# Threads that spin while they wait starve those they wait for, where cores are shared or under a quota.
ENV OMP_WAIT_POLICY=passive NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    TRITON_CACHE_DIR=/var/cache/outrider/triton TORCHINDUCTOR_CACHE_DIR=/var/cache/outrider/inductor
USER 65532:65532
ENTRYPOINT ["python", "-m", "outrider_runtime"]
COPY --chmod=0755 runtime/outrider_runtime /opt/outrider/outrider_runtime
