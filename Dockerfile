# syntax=docker/dockerfile:1
# docker build -t attache .        docker run --read-only -p 9002:9002 -p 9003:9003 -p 9090:9090 attache run --endpoint HOST:PORT
FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY Cargo.toml Cargo.lock ./
COPY src ./src
# The program prints and starts these bootstraps.
COPY envoy ./envoy
# Cargo checks that every declared target has its file.
COPY benches ./benches
COPY tests ./tests
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/src/target \
    cargo build --release --locked --package attache --package attache-envoy-module --bin attache --lib && \
    cp target/release/attache target/release/libattache_envoy.so /

# glibc and CA certificates, no shell, no package manager.
FROM gcr.io/distroless/cc-debian12:nonroot
COPY --from=build /attache /usr/local/bin/attache
# For Envoy; `attache envoy-module` prints this path.
COPY --from=build /libattache_envoy.so /usr/local/lib/attache/libattache_envoy.so
# The image's `nonroot`, by number so that Kubernetes can check `runAsNonRoot`. Nothing is written to disk.
USER 65532:65532
# ext-proc, gRPC health, metrics.
EXPOSE 9002 9003 9090
ENTRYPOINT ["/usr/local/bin/attache"]
CMD ["run"]
