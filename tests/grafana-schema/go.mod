// Reads dashboards as the SDK of Grafana does: tests/install-grafana-schema.sh builds it.
module attache.test/grafana-schema

go 1.22

require github.com/grafana/grafana-foundation-sdk/go v0.0.22
