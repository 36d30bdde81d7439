# Winnow in a container: docs/guide/docker.md says how to build and run it. `VLLM` is none (a CPU), cpu (a CPU, with vLLM's
# CPU build) or gpu; `TORCH_INDEX` an index to take torch from, in place of PyPI; `UID` the user that runs it.
FROM python:3.11-bookworm

ARG VLLM=none
ARG TORCH_INDEX=
ARG UID=1000

# The sandbox in which the verifier `code` runs programs.
RUN apt-get update -qq \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends bubblewrap \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid "$UID" winnow \
    && install --directory --owner winnow --group winnow /winnow /winnow/data /opt/venv

# The environment stands beside the project, so that a clone can be mounted in the project's place.
ENV VENV=/opt/venv PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /winnow
USER winnow

# What the environment is made from, first: other changes of the project do not install it again.
COPY --chown=winnow:winnow Makefile pyproject.toml README.md LICENSE requirements.txt requirements-cpu.txt ./
COPY --chown=winnow:winnow flows/__init__.py flows/
COPY --chown=winnow:winnow tasks/__init__.py tasks/
RUN make env VLLM="$VLLM" TORCH_INDEX="$TORCH_INDEX"

COPY --chown=winnow:winnow . .
RUN dvc config --local core.no_scm true

VOLUME /winnow/data
ENTRYPOINT ["winnow"]
CMD ["--help"]
