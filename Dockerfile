# An image that trains, with the environment of one external engine, or of none:
#
#     docker build -t unirl:vllm-omni --build-arg ENGINE=vllm-omni .
#     docker run --gpus all --ipc=host -v "$PWD:/work" unirl:vllm-omni unirl train quickstart
#
# Without CUDA, for machines without an NVIDIA GPU and for CI:
#
#     docker build -t unirl:cpu --build-arg BASE=debian:bookworm-slim --build-arg ACCEL=cpu .
#
# ENGINE is passed to `unirl engine-env`, options included: "vllm-omni --release 0.30.0". Separate several with commas to
# put them into one image. The driver comes from the host; the compiler is for kernels that engines build
# on their first start.
ARG BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04
FROM ${BASE}

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates g++ git libnuma1 python3 python3-dev python3-pip python3-venv \
    && rm -rf /var/lib/apt/lists/*

COPY . /opt/unirl
ARG ACCEL=cuda
RUN python3 /opt/unirl/bootstrap.py --accel "${ACCEL}" && rm -rf /root/.cache

ENV VIRTUAL_ENV=/opt/unirl/.venv PATH=/opt/unirl/.venv/bin:/opt/unirl/.uv-bin/bin:${PATH} \
    UNIRL_ENVS=/opt/unirl-envs UV_NO_SYNC=1 RAY_ENABLE_UV_RUN_RUNTIME_ENV=0

ARG ENGINE=
RUN printf '%s' "${ENGINE}" | tr ',' '\n' | while read -r engine || [ -n "${engine}" ]; do \
        unirl engine-env ${engine} --accel "${ACCEL}" || exit 1; \
    done && rm -rf /root/.cache

WORKDIR /work
CMD ["unirl", "doctor"]
