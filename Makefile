# sudo make demo   installs what is missing, builds, deploys real images, cleans up
# sudo make test   the same, then every test
# make check       for the daily loop: lint's first half and the quick tests, in a minute and a half, without root
#
# The first two need root: containers, mounts and network namespaces are real.

export DEWPOINT_TOOLS ?= /var/cache/dewpoint/tools
export DEWPOINT_IMAGES ?= /var/cache/dewpoint/images
export PATH := $(DEWPOINT_TOOLS)/go/bin:$(PATH):/usr/local/go/bin:/usr/sbin:/sbin
# The Go of go.mod, or a newer one: what is here, or the module that a Go of 1.21 or newer fetches. Neither is one line of "no Go".
GO_WANTED := $(shell awk '$$1 == "go" { print $$2 }' go.mod)
GO_HERE := $(shell cd / && PATH='$(PATH)' GOTOOLCHAIN=local go env GOVERSION 2>/dev/null | sed 's/^go//; s/[^0-9.].*//')
at_least = $(shell printf '%s\n%s\n' $(1) '$(GO_HERE)' | sort -VC && echo yes)
export GOTOOLCHAIN := $(if $(call at_least,$(GO_WANTED)),local,$(if $(call at_least,1.21),go$(GO_WANTED),none))
export GOFLAGS := -buildvcs=false -trimpath
export HOME ?= /root

VERSION := $(shell git -c safe.directory='$(CURDIR)' describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X main.version=$(VERSION)
PROGRAMS := ./cmd/dewd ./cmd/dew

# ISA-L inflates three times faster than Go; without it or a C compiler the build is pure Go.
ISAL := $(shell command -v gcc >/dev/null && pkg-config --exists libisal 2>/dev/null && echo isal)
# Without grpc's page of requests, which runs templates, the linker leaves out what nobody calls: a quarter of dewd.
comma := ,
TAGS := grpcnotrace$(if $(ISAL),$(comma)isal)
# Without a compiler each container has a shim of its own, and runc makes it.
SHIM = $(if $(shell command -v gcc),cmd/containerd-shim-dewpoint-v1/build,@echo no gcc, so no)
BUILD = $(if $(ISAL),CGO_ENABLED=1,CGO_ENABLED=0) go build -tags $(TAGS) -ldflags '$(LDFLAGS)'

.PHONY: go build build-lab build-static notices package release images demo test suite check test-dmtcp test-hosts lint bench fuzz soak arm64 generate clean

build: go
	mkdir -p bin
	$(BUILD) -o bin/ $(PROGRAMS)
	$(SHIM) bin/containerd-shim-dewpoint-v1

# The laboratory, a module of its own: what measures, and what "dewlab bench deploy" drives containerd's client library by.
build-lab: go
	mkdir -p bin
	cd lab && $(BUILD) -o ../bin/ ./dewlab ./bench/ctrclient

build-static: go
	mkdir -p bin/static
	CGO_ENABLED=0 go build -tags grpcnotrace -ldflags '$(LDFLAGS)' -o bin/static/ $(PROGRAMS)
	$(SHIM) bin/static/containerd-shim-dewpoint-v1

go:
	@[ $(GOTOOLCHAIN) != none ] || { echo "make: no Go $(GO_WANTED) or newer is here, nor one from 1.21 on that fetches it: sudo scripts/install build" >&2; exit 1; }

# What the programs are linked with, by its licences.
notices: go
	mkdir -p bin
	scripts/notices >bin/THIRD-PARTY-NOTICES

# bin/packages: Debian packages, RPMs and archives of the programs, the same bytes from the same source.
package: go
	scripts/package

# What a release has: packages, checksums, and notes, which are the changelog's first section.
release: go
	rm -rf bin/packages
	scripts/package
	awk '/^## / { n++; next } n == 1' CHANGELOG.md >bin/packages/NOTES.md
	cd bin/packages && sha256sum dewpoint* NOTES.md >SHA256SUMS

images:
	go -C lab run ./dewlab bench images -dir $(DEWPOINT_IMAGES)

demo:
	scripts/install demo
	$(MAKE) build build-lab images
	demo/run

test:
	scripts/install test
	$(MAKE) build images lint suite

# A make of its own: Go may have come by scripts/install.
suite: go
	scripts/test

# What is left out says so: tests that need root, and long ones. For root, tests run as nobody all the same.
check: go
	@$(FORMATTED)
	go vet -tags $(TAGS) ./...
	cd lab && go vet -tags $(TAGS) ./...
	bash -o pipefail -c "go test -json -short -vet=off -p 4 -tags $(TAGS) $(UNPRIVILEGED) ./... | go run ./test/report /dev/null"

UNPRIVILEGED = $(if $(filter 0,$(shell id -u)),-exec '$(CURDIR)/scripts/unprivileged')

# The second checkpoint engine, where DMTCP is installed: docs/design/checkpoints-dmtcp.md.
test-dmtcp:
	@command -v dmtcp_launch >/dev/null || { echo "dmtcp_launch is not in PATH" >&2; exit 1; }
	go test -count=1 -tags dmtcp -run 'TestProbe|TestContract/(Lacks|Things|Clones|Uncopied)' ./internal/checkpoint/dmtcp
	go test -count=1 -tags dmtcp,$(TAGS) -run 'ByDMTCP$$' ./test

# Hosts that are costly to have: docs/operate/hosts.md. Not in CI.
test-hosts: go
	scripts/install hosts
	go test -count=1 -tags hosts,$(TAGS) -run '^TestHosts' ./test

FORMATTED = test -z "$$(gofmt -l api cmd demo internal lab test testkit | tee /dev/stderr)"

lint:
	go vet -tags $(TAGS),soak,hosts ./...
	cd lab && go vet -tags $(TAGS) ./...
	@$(FORMATTED)
	$(DEWPOINT_TOOLS)/staticcheck-*/staticcheck -tags $(TAGS),soak,hosts ./...
	cd lab && $(DEWPOINT_TOOLS)/staticcheck-*/staticcheck -tags $(TAGS) ./...

# make bench ARGS='pull -rates 20 -images nginx:1'
bench:
	scripts/install bench
	$(MAKE) build build-lab
	bin/dewlab bench $(or $(ARGS),pull)

fuzz:
	scripts/fuzz $(or $(SECONDS),10)

# Random schedules of operations and faults on a node, or a PoP (NODES=3): make soak MINUTES=10 SEED=1
soak: go
	scripts/install test
	MINUTES=$(or $(MINUTES),10) SEED=$(or $(SEED),1) NODES=$(or $(NODES),1) go test -count=1 -v -timeout 0 \
		-tags $(TAGS),soak -run '^TestSoak$$' ./test

arm64:
	scripts/install arm64
	scripts/test-arm64 '$(LDFLAGS)' $(PROGRAMS)

generate:
	go generate ./...

clean:
	rm -rf bin
