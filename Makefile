# Everything from a fresh clone on Debian, set-up included. Needs Rust (cargo) and, to install packages, root.

CARGO ?= cargo
# For building: a linker. For a test that takes too long: the stacks of its threads.
PACKAGES = gcc libc6-dev elfutils
# What the tests of `make test` use. Each installs what it lacks, but that takes longer than all at once.
TEST_PACKAGES = bindfs binutils cpio cryptsetup-bin e2fsprogs fio fuse3 gnutls-bin iproute2 kmod libnbd-bin libxml2-utils lz4 mount \
  nbd-client nbdkit passt prometheus python3 python3-libnbd qemu-system-x86 qemu-utils rsync sqlite3 systemd user-mode-linux valgrind \
  xfsprogs xz-utils zstd
# No questions from apt, and no colours in logs.
SHELL = bash
export DEBIAN_FRONTEND = noninteractive

.PHONY: all install uninstall deb demo test guests soak deny setup packages format lint doc tests guest-tests doc-tests interleavings features package fuzz api api-update

## all: the program, target/release/walvisor; then this list
all: setup
	$(CARGO) build --release --package walvisor
	@echo; sed -n 's/^## \([a-z]*\): /make \1: /p' $(MAKEFILE_LIST)

# Where the installation goes. DESTDIR is put before every place, for who makes a package.
PREFIX ?= /usr/local
DESTDIR ?=
# The profile that the installation is built with: `release`, or `dev`, which the test of the installation takes.
PROFILE ?= release
BIN = $(DESTDIR)$(PREFIX)/bin
SHARE = $(DESTDIR)$(PREFIX)/share
SYSTEMD = $(DESTDIR)$(PREFIX)/lib/systemd/system
UNITS = $(wildcard docs/nbd/*.service docs/nbd/*.socket docs/vhost-user/*.service docs/vhost-user/*.socket docs/operations/*.service)

## install: the program, its manual pages, completions for bash, zsh and fish, systemd units; PREFIX=/usr/local DESTDIR=
install: setup
	$(CARGO) build --profile $(PROFILE) --locked $(OF) --bin walvisor --bin walvisor-manual
	install -D -m 755 $(BUILT)/walvisor $(BIN)/walvisor
	umask 022 && $(BUILT)/walvisor-manual $(SHARE)
	install -d $(SYSTEMD)
	for unit in $(UNITS); do \
	  sed 's|/usr/local/bin/|$(PREFIX)/bin/|' $$unit | install -m 644 /dev/stdin $(SYSTEMD)/$${unit##*/} || exit; done

# A test takes what the tests of the workspace have built, with the features of dependencies that those take.
OF = $(if $(filter dev,$(PROFILE)),--workspace --example embed,--package walvisor --package walvisor-manual)
BUILT = $${CARGO_TARGET_DIR:-target}/$(if $(filter dev,$(PROFILE)),debug,$(PROFILE))

## uninstall: removes what `make install` with the same PREFIX and DESTDIR has placed
uninstall:
	rm -f $(BIN)/walvisor $(SHARE)/man/man1/walvisor.1 $(SHARE)/man/man1/walvisor-*.1 \
	  $(SHARE)/bash-completion/completions/walvisor $(SHARE)/zsh/site-functions/_walvisor \
	  $(SHARE)/fish/vendor_completions.d/walvisor.fish $(addprefix $(SYSTEMD)/,$(notdir $(UNITS)))

# Where the package goes, and the tree that it is packed from.
DEB = target/debian
DEB_ROOT = $(DEB)/root

## deb: a Debian package of the same files in `target/debian`
deb:
	rm -rf $(DEB_ROOT)
	$(MAKE) install PREFIX=/usr DESTDIR=$(abspath $(DEB_ROOT))
	strip $(DEB_ROOT)/usr/bin/walvisor
	mv $(DEB_ROOT)/usr/share/zsh/site-functions $(DEB_ROOT)/usr/share/zsh/vendor-completions
	gzip -9n $(DEB_ROOT)/usr/share/man/man1/*
	install -D -m 644 LICENSE $(DEB_ROOT)/usr/share/doc/walvisor/copyright
	install -d -m 755 $(DEB_ROOT)/DEBIAN
	install -m 755 walvisor/debian/postinst walvisor/debian/prerm walvisor/debian/postrm $(DEB_ROOT)/DEBIAN
	version=$$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml) libc=$$(dpkg-query -W -f '$${source:Upstream-Version}' libc6) && \
	sed "s/@VERSION@/$$version/; s/@ARCHITECTURE@/$$(dpkg --print-architecture)/; s/@LIBC@/$$libc/" walvisor/debian/control \
	  >$(DEB_ROOT)/DEBIAN/control
	dpkg-deb --root-owner-group --build $(DEB_ROOT) $(DEB)/

## demo: the embedded guest, then a Debian guest that runs fio on two disks on one write-ahead log, and a table
demo: setup
	$(CARGO) build --release --package walvisor --package walvisor-guest-images
	WALVISOR=target/release/walvisor target/release/walvisor-guest-images demo

## test: formatting, lints, documentation, all tests but those of `make guests`; prints the seconds of each part
test: setup
	@tests/parts packages format lint doc tests doc-tests interleavings features

## guests: all that boots kernels which are not ours, and the long tests of what is installed and packed
guests: setup
	@tests/parts guest-tests package

## soak: for ever, or for SOAK_MINUTES: new seeds, mutants, fuzzing, power cuts, kills; keeps the seeds that fail
soak: setup
	@tests/soak

## api: whether the public items of the crates that others embed are those in their api.txt; `make api-update` writes these
api: setup
	tests/run --only tests/api
api-update: setup
	WALVISOR_API=update tests/run --only tests/api

## deny: whether licences, sources and versions of the dependencies are those that deny.toml allows; needs cargo-deny
deny:
	$(CARGO) deny --locked check licenses bans sources

setup:
	@command -v $(CARGO) >/dev/null || { echo 'cargo is missing: install Rust 1.95 or newer' >&2; exit 1; }
	@command -v cc >/dev/null && command -v eu-stack >/dev/null || $(call install,$(PACKAGES))

# What the tests would otherwise install one after the other, each when it needs it.
packages:
	@dpkg-query -W $(TEST_PACKAGES) >/dev/null 2>&1 || $(call install,$(TEST_PACKAGES))

install = { echo 'installing with apt-get: $(1)'; apt-get -q install -y --no-install-recommends $(1) || \
  { apt-get -q update && apt-get -q install -y --no-install-recommends $(1); }; }

format:
	$(CARGO) fmt --all --check

lint:
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	$(CARGO) clippy --package walvisor-storage --lib --profile test --features shuttle --locked -- -D warnings
	CARGO_PROFILE_DEV_PANIC=abort $(CARGO) clippy --package walvisor-guest --bin walvisor-guest --features freestanding --locked -- -D warnings

doc:
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --workspace --no-deps --locked --quiet

tests:
	tests/run

guest-tests:
	tests/run --tier guests --limit 3600

doc-tests:
	$(CARGO) test --workspace --locked --doc --quiet

# Threads of the store in every order, on a scheduler of their own.
interleavings:
	$(CARGO) test --package walvisor-storage --lib --features shuttle --locked interleavings

# A program that brings its own disk gets neither the store nor io_uring nor KVM with the devices. Without the default
# features it gets no TLS either, and each feature builds alone. What is installed needs nothing of the tests.
features:
	! $(CARGO) tree --package walvisor-devices --edges normal --locked | grep -E 'walvisor-storage|io-uring|kvm'
	! $(CARGO) tree --package walvisor-devices --edges normal --no-default-features --locked | grep -E 'rustls|webpki'
	! $(CARGO) tree --package walvisor --package walvisor-manual --edges normal,build --locked | grep -E 'walvisor-test|blkio|vhost v|trycmd'
	for feature in '' nbd scsi tcmu tls ublk vhost-user; do \
	  $(CARGO) check --package walvisor-devices --no-default-features --features "$$feature" --locked || exit; done

# The crates for others: what packing refuses would stay unseen until the day of a release.
PACKED = --package walvisor-block --package walvisor-storage --package walvisor-archive --package walvisor-devices --package walvisor-guest --package walvisor-vmm --package walvisor
package:
	$(CARGO) package $(PACKED) --no-verify --allow-dirty --offline --quiet

# libFuzzer's counters, on a stable compiler: what cargo-fuzz passes to a nightly one.
COVERAGE = --cfg fuzzing -Ccodegen-units=1 -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
  -Cllvm-args=-sanitizer-coverage-trace-compares
# Seconds for the log's target, and for each of the others; the seed of their random choices.
FUZZ_TIME ?= 25
FUZZ_SHORT_TIME ?= 9
FUZZ_SEED ?= 1
# What is built for them, and what each target finds.
FUZZ_DIR = $(CURDIR)/target/fuzz

## fuzz: mutated logs, hostile drivers, SCSI commands, any text on the control socket; a failing input joins the corpus that `make test` replays
fuzz: setup
	@$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync $(FUZZ)

# Two at a time, for each has one thread. A failure stops none of the others.
FUZZ = fuzz-recover fuzz-control fuzz-requests fuzz-net fuzz-mmio fuzz-pci fuzz-cdb fuzz-tcmu_ring fuzz-virtio_scsi
.PHONY: $(FUZZ) fuzz-build

fuzz-recover: fuzz-build
	$(call run_fuzz,storage/fuzz,recover,$(FUZZ_TIME),8192)
fuzz-control: fuzz-build
	$(call run_fuzz,walvisor/fuzz,control,$(FUZZ_SHORT_TIME),320)
fuzz-requests: fuzz-build
	$(call run_fuzz,devices/fuzz,requests,$(FUZZ_SHORT_TIME),8192)
fuzz-net: fuzz-build
	$(call run_fuzz,devices/fuzz,net,$(FUZZ_SHORT_TIME),4096)
fuzz-mmio: fuzz-build
	$(call run_fuzz,devices/fuzz,mmio,$(FUZZ_SHORT_TIME),512)
fuzz-pci: fuzz-build
	$(call run_fuzz,devices/fuzz,pci,$(FUZZ_SHORT_TIME),512)
fuzz-cdb: fuzz-build
	$(call run_fuzz,devices/fuzz,cdb,$(FUZZ_SHORT_TIME),2048)
fuzz-tcmu_ring: fuzz-build
	$(call run_fuzz,devices/fuzz,tcmu_ring,$(FUZZ_SHORT_TIME),512)
fuzz-virtio_scsi: fuzz-build
	$(call run_fuzz,devices/fuzz,virtio_scsi,$(FUZZ_SHORT_TIME),2048)

fuzz-build:
	@command -v c++ >/dev/null || $(call install,g++)
	@host=$$(rustc -vV | sed -n 's/^host: //p') && \
	export RUSTFLAGS='$(COVERAGE) -D warnings' RUSTC_WORKSPACE_WRAPPER=clippy-driver CARGO_TARGET_DIR=$(FUZZ_DIR) && \
	$(CARGO) build --profile fuzz --locked --target $$host --features libfuzzer \
	  --package walvisor-storage-fuzz --package walvisor-devices-fuzz --package walvisor-fuzz

# Of the package in $(1) the target $(2), for $(3) seconds, on inputs of at most $(4) bytes.
define run_fuzz
	@cd $(1) && target=$(FUZZ_DIR)/$$(rustc -vV | sed -n 's/^host: //p')/fuzz/$(2) log=$(FUZZ_DIR)/$(2).log && \
	mkdir -p $(FUZZ_DIR)/corpus/$(2) && \
	if ! RUST_BACKTRACE=0 $$target -seed=$(FUZZ_SEED) -max_total_time=$(3) -timeout=5 -rss_limit_mb=512 \
	  -max_len=$(4) -artifact_prefix=corpus/$(2)/ $(FUZZ_DIR)/corpus/$(2) corpus/$(2) >$$log 2>&1; then \
	  tail -n 40 $$log; \
	  echo "replay: $$target $(1)/<the file named above>"; exit 1; \
	fi; \
	first=$$(grep -o 'INITED cov: [0-9]*' $$log | grep -o '[0-9]*'); \
	last=$$(grep -o 'DONE *cov: [0-9]*' $$log | grep -o '[0-9]*'); \
	echo "fuzz $(2): seed $(FUZZ_SEED), $$(grep '^Done' $$log), coverage $$first -> $$last"; \
	test "$$first" -gt 0
endef
