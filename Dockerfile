# One node of a kafkalite cluster: broker, controller, or both.
#
#   docker build -t kafkalite .
#   docker build -t kafkalite --build-arg BASE_IMAGE=debian-with-python .
#
# The base needs Python 3.11 or newer with its venv module, and a way for pip to find packages.
ARG BASE_IMAGE=python:3.13-slim

FROM ${BASE_IMAGE} AS build
# What it needs, in a layer that stays as it is when only its own code changes.
COPY setup.cfg pyproject.toml README.md /needs/
RUN mkdir /needs/kafkalite \
    && touch /needs/kafkalite/__init__.py \
    && python3 -m venv /opt/kafkalite \
    && /opt/kafkalite/bin/pip install --no-cache-dir --quiet "/needs[server,cli,tls]"
COPY setup.cfg pyproject.toml README.md /source/
COPY kafkalite /source/kafkalite
RUN /opt/kafkalite/bin/pip install --no-cache-dir --quiet --no-deps --force-reinstall /source

FROM ${BASE_IMAGE}
COPY --from=build /opt/kafkalite /opt/kafkalite
RUN groupadd --gid 10001 kafkalite \
    && useradd --uid 10001 --gid 10001 --home-dir /var/lib/kafkalite --shell /usr/sbin/nologin kafkalite \
    && mkdir -p /var/lib/kafkalite \
    && chown kafkalite:kafkalite /var/lib/kafkalite
ENV PATH=/opt/kafkalite/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    KAFKALITE_LISTENERS=0.0.0.0:9092 \
    KAFKALITE_LOG_DIRS=/var/lib/kafkalite
USER kafkalite
WORKDIR /var/lib/kafkalite
VOLUME /var/lib/kafkalite
EXPOSE 9092 9093
# SIGTERM is a controlled shutdown: the node hands over what it leads, answers what is in flight, syncs, leaves.
STOPSIGNAL SIGTERM
# Healthy: this node itself answers, is a live member of its cluster, and the cluster has a controller. The
# check logs in with KAFKALITE_CLUSTER_SECRET, which a node needs for it if its first listener requires logins.
HEALTHCHECK --interval=10s --timeout=10s --start-period=60s --retries=3 \
    CMD ["kl", "cluster", "wait", "--this-node", "--quiet", "--timeout", "8s"]
ENTRYPOINT ["kl"]
CMD ["server", "start"]
