# Everything from a fresh clone on Debian, set-up included. Needs Rust (cargo) and, to install packages, root.

CARGO ?= cargo
# For building: a linker, and for the fuzz targets a C++ compiler. The rest is installed by what needs it, when it needs it.
PACKAGES = gcc g++ libc6-dev
# No questions from apt, and no colours in logs.
SHELL = bash
export DEBIAN_FRONTEND = noninteractive

.PHONY: all install uninstall deb demo test soak quick deny setup format lint doc check fuzz api api-update

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

## test: formatting, lints, documentation, and every test; prints how many were skipped, and why
test: setup format lint doc
	@failed=; for part in check fuzz; do $(MAKE) --no-print-directory $$part || failed="$$failed $$part"; done; \
	[ -z "$$failed" ] || { echo "make test failed in:$$failed (each said why at its end)" >&2; exit 1; }

# Recordings of each kind, and which power cuts of each: after each FLUSH, FUA and mark, a window before each FLUSH, and some more.
# Many times the histories, schedules and fuzzing of a test.
SOAK_ROUNDS ?= 1
SOAK_POWER_CUTS ?= each
SOAK_HISTORIES ?= 1000000
SOAK_INTERLEAVINGS ?= 50000
SOAK_MEMBER_CYCLES ?= 1000
SOAK_FAILING_ROUNDS ?= 200
SOAK_BACKUP_SECONDS ?= 1200
SOAK_UBLK_KILLS ?= 50

## soak: thousands of power cuts, a million random histories, long fuzzing; WALVISOR_SEED=N repeats the power cuts
soak: setup
	WALVISOR_POWER_CUT_ROUNDS=$(SOAK_ROUNDS) WALVISOR_POWER_CUTS=$(SOAK_POWER_CUTS) \
	  $(CARGO) test --package walvisor-tests --test power_cut --locked -- --nocapture
	WALVISOR_HISTORIES=$(SOAK_HISTORIES) $(CARGO) test --package walvisor-storage --lib --locked histories -- --nocapture
	WALVISOR_MEMBER_CYCLES=$(SOAK_MEMBER_CYCLES) $(CARGO) test --package walvisor-storage --test members --locked -- --nocapture
	WALVISOR_MEMBER_CYCLES=$(SOAK_MEMBER_CYCLES) $(CARGO) test --package walvisor --test serve --locked members -- --nocapture
	WALVISOR_BACKUP_SECONDS=$(SOAK_BACKUP_SECONDS) $(CARGO) test --package walvisor --test serve --locked backup -- --nocapture
	WALVISOR_FAILING_ROUNDS=$(SOAK_FAILING_ROUNDS) $(CARGO) test --package walvisor-tests --test media --locked failing -- --nocapture
	WALVISOR_UBLK_KILLS=$(SOAK_UBLK_KILLS) $(CARGO) test --package walvisor-tests --test ublk_kernel --locked -- --nocapture
	WALVISOR_INTERLEAVINGS=$(SOAK_INTERLEAVINGS) \
	  $(CARGO) test --package walvisor-storage --lib --features shuttle --locked interleavings -- --nocapture
	WALVISOR_PACKED_CRATES=3 $(CARGO) test --package walvisor-tests --test packs --locked
	$(MAKE) fuzz FUZZ_TIME=250 FUZZ_SHORT_TIME=90

## api: whether the public items of the crates that others embed are those in their api.txt; `make api-update` writes these
api: setup
	$(TEST) --test api
api-update: setup
	WALVISOR_API=update $(TEST) --test api

## deny: whether licences, sources and versions of the dependencies are those that deny.toml allows; needs cargo-deny
deny:
	$(CARGO) deny --locked check licenses bans sources

setup:
	@command -v $(CARGO) >/dev/null || { echo 'cargo is missing: install Rust 1.95 or newer' >&2; exit 1; }
	@command -v cc >/dev/null && command -v c++ >/dev/null || { echo 'installing with apt-get: $(PACKAGES)'; \
	  apt-get -q install -y --no-install-recommends $(PACKAGES) || \
	  { apt-get -q update && apt-get -q install -y --no-install-recommends $(PACKAGES); }; }

## quick: before each commit, in about three minutes after a build: lints, and the tests that need no root, packages or KVM
quick:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	WALVISOR_HISTORIES=500 $(CARGO) test --workspace --locked --lib -- $(SLOW:%=--skip %)
	$(CARGO) test --workspace --locked --test layers --test links --test messages

# Tests of the libraries that take longer than all others together.
SLOW = every_planted exhaustive damage_is_reported_or_harmless

format:
	$(CARGO) fmt --all --check
	cd storage/fuzz && $(CARGO) fmt --check
	cd devices/fuzz && $(CARGO) fmt --check
	cd walvisor/fuzz && $(CARGO) fmt --check

lint:
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	$(CARGO) clippy --package walvisor-storage --lib --profile test --features shuttle --locked -- -D warnings
	CARGO_PROFILE_DEV_PANIC=abort $(CARGO) clippy --package walvisor-guest --bin walvisor-guest --features freestanding --locked -- -D warnings

# The crates for others are packed too: what that refuses would stay unseen until the day of a release.
PACKED = --package walvisor-block --package walvisor-storage --package walvisor-archive --package walvisor-devices --package walvisor-guest --package walvisor-vmm --package walvisor

doc:
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --workspace --no-deps --locked --quiet
	$(CARGO) package $(PACKED) --no-verify --allow-dirty --offline --quiet

# The output of passed tests is needed to count those that could not run here. What failed is repeated at the end.
check:
	@mkdir -p target
	@set -o pipefail; status=0; \
	tests/left-over $(MAKE) --no-print-directory test-all 2>&1 | tee target/test.log || status=1; \
	grep -o 'skipped: .*' target/test.log | sort | uniq -c; \
	echo "tests: $$(grep -c '^test .* ok$$' target/test.log) ok, of which" \
	  "$$(grep -c 'skipped: ' target/test.log) could not run here (skipped)"; \
	grep '^test .* FAILED$$' target/test.log | while read -r _ name _; do \
	  echo "failed: $$name"; grep -F -A 20 -e "---- $$name stdout ----" target/test.log; done; \
	grep '^left over: ' target/test.log; \
	grep '^time limit: ' target/test.log; \
	exit $$status

# Tests that mostly wait run beside those that compute; each prints at its end. Then the guests that QEMU emulates, one after
# the other, run beside all other tests with guests or clients, most of which use one processor: the longest first, and two at
# a time once the emulated ones have ended. Test targets that have one name in several crates run together: with the guests,
# if one of them is a guests'.
BESIDE = test-waiting test-computing
GUESTS_BESIDE = test-emulated $(NATIVE:%=test-of-%)
.PHONY: test-all $(BESIDE) test-emulated test-workspace test-interleavings test-embedded
names = $(basename $(notdir $(wildcard $(1:%=%/*.rs)))) $(notdir $(patsubst %/main.rs,%,$(wildcard $(1:%=%/*/main.rs))))
GUESTS = $(call names,$(addprefix tests/,promises doors guests install tree) benches/tests)
EMULATED = linux linux_disks kill linux_boot vhost_user jobs own_guest linux_net ublk_kernel
LONG = power_cut database nbd_kernel drbd tcmu_kernel scsi_conformance
NATIVE = $(LONG) $(sort $(filter-out $(EMULATED) $(LONG),$(GUESTS)))
COMPUTING = $(filter-out $(GUESTS),$(call names,$(addsuffix /tests,block storage guest-images)))
WAITING = $(filter-out $(GUESTS) $(COMPUTING),$(call names,$(addsuffix /tests,vmm walvisor devices)))

# Examples with tests.
EXAMPLES = embed event_loop

# All commands take the same packages, so that they have the same features: nothing is built twice.
TIME_LIMIT = --config 'target."cfg(unix)".runner = "$(abspath tests/time-limit)"'
TEST = $(CARGO) test --workspace --locked --no-fail-fast $(TIME_LIMIT)

test-all:
	$(TEST) --no-run
	@failed=; for lanes in "$(BESIDE)" "$(GUESTS_BESIDE)"; do \
	$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync $$lanes || failed=1; done; [ -z "$$failed" ]

test-emulated:
	+@$(call each,$(EMULATED:%=test-of-%))

# Each of these targets, whether or not one before it failed.
each = failed=; for part in $(1); do $(MAKE) --no-print-directory $$part || failed=1; done; [ -z "$$failed" ]

test-of-%:
	$(TEST) --test $* -- --show-output

test-waiting:
	$(TEST) $(WAITING:%=--test %) -- --show-output

test-computing:
	+@$(call each,test-workspace test-interleavings test-embedded)

test-workspace:
	$(TEST) --lib --bins $(EXAMPLES:%=--example %) $(COMPUTING:%=--test %) -- --show-output
	$(TEST) --doc -- --show-output

test-interleavings:
	$(CARGO) test --package walvisor-storage --lib --features shuttle --locked $(TIME_LIMIT) interleavings -- --show-output

# A program that brings its own disk gets neither the store nor io_uring nor KVM with the devices. Without the default
# features it gets no TLS either, and each feature builds alone. What is installed needs nothing of the tests.
test-embedded:
	! $(CARGO) tree --package walvisor-devices --edges normal --locked | grep -E 'walvisor-storage|io-uring|kvm'
	! $(CARGO) tree --package walvisor-devices --edges normal --no-default-features --locked | grep -E 'rustls|webpki'
	! $(CARGO) tree --package walvisor --package walvisor-manual --edges normal,build --locked | grep -E 'walvisor-test|blkio|vhost v|trycmd'
	for feature in '' nbd scsi tcmu tls ublk vhost-user; do \
	  $(CARGO) check --package walvisor-devices --no-default-features --features "$$feature" --locked || exit; done

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

## fuzz: mutated logs, hostile drivers, SCSI commands, any text on the control socket; what they find in `target/fuzz/corpus` makes the next run deeper
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
	@cd walvisor/fuzz && host=$$(rustc -vV | sed -n 's/^host: //p') && \
	export RUSTFLAGS='$(COVERAGE) -D warnings' RUSTC_WORKSPACE_WRAPPER=clippy-driver CARGO_TARGET_DIR=$(FUZZ_DIR) && \
	$(CARGO) build --workspace --release --locked --target $$host

# Of the package in $(1) the target $(2), for $(3) seconds, on inputs of at most $(4) bytes.
define run_fuzz
	@cd $(1) && target=$(FUZZ_DIR)/$$(rustc -vV | sed -n 's/^host: //p')/release/$(2) log=$(FUZZ_DIR)/$(2).log && \
	mkdir -p $(FUZZ_DIR)/corpus/$(2) artifacts && \
	if ! RUST_BACKTRACE=0 $$target -seed=$(FUZZ_SEED) -max_total_time=$(3) -timeout=5 -rss_limit_mb=512 \
	  -max_len=$(4) -artifact_prefix=artifacts/ $(FUZZ_DIR)/corpus/$(2) corpus/$(2) >$$log 2>&1; then \
	  tail -n 40 $$log; \
	  echo "replay: $$target $(1)/<the file named above>"; exit 1; \
	fi; \
	first=$$(grep -o 'INITED cov: [0-9]*' $$log | grep -o '[0-9]*'); \
	last=$$(grep -o 'DONE *cov: [0-9]*' $$log | grep -o '[0-9]*'); \
	echo "fuzz $(2): seed $(FUZZ_SEED), $$(grep '^Done' $$log), coverage $$first -> $$last"; \
	test "$$first" -gt 0
endef
