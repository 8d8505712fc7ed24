//! libiscsi's conformance tests on the disk as a SCSI disk, through the SCSI target and the generic
//! SCSI driver of user-mode Linux, in which `walvisor serve tcmu` runs too.

use walvisor_tests::{have, run_in_user_mode};

/// Commands that the tests try and that the server does not support.
const NOT_THERE: &str = "not there: EXTENDEDCOPY ORWRITE PREFETCH10 PREFETCH16 READDEFECTDATA10 \
                         READDEFECTDATA12 RECEIVECOPYRESULT RECEIVE_COPY_RESULTS";

/// The tested disks: one of less than 65536 blocks of 512 bytes (one test reads that many at once,
/// more than tcm_loop takes), and one of larger blocks.
const JOB: &str = r#"
mkdir -p /var/target/pr
mount -t configfs configfs /sys/kernel/config
walvisor() { "$WALVISOR" "$@"; }
walvisor disk create small.img --size 24M --log log || exit
walvisor disk create large.img --size 80M --log log || exit
: >served
"$WALVISOR" serve tcmu --disk path=small.img,log=log,name=small --disk path=large.img,log=log,name=large,block-size=4096 \
    >served 2>daemon.log &
daemon=$!
until [ "$(wc -l <served)" = 2 ]; do
    kill -0 $daemon 2>/dev/null || { echo "guest: no daemon: $(cat daemon.log)"; break; }
    sleep 0.2
done
for name in small large; do
    device=$(sed -n "s|^serving $name: .* at /dev/\([a-z]*\) .*|\1|p" served)
    generic=$(ls /sys/block/"$device"/device/scsi_generic)
    iscsi-test-cu --dataloss --test=ALL /dev/"$generic" >"$name.tests" 2>&1
    echo "guest: $name: $(awk '$1 == "tests" { print $3 " tests" }' "$name.tests")"
    awk '/^Suite: / { suite = $2 } /^  Test: / { test = $2 } /FAILED$/ { print "guest: fails: " suite "." test }' "$name.tests"
    echo "guest: not there:" $(grep -o '[A-Z0-9_]* is not implemented' "$name.tests" | cut -d' ' -f1 | LC_ALL=C sort -u)
done
kill -TERM $daemon
wait $daemon
echo "guest: daemon: status $?"
cat daemon.log
for name in small large; do
    walvisor disk check $name.img --log log >/dev/null
    echo "guest: check of $name.img: status $?"
done
"#;

#[test]
fn libiscsi_finds_what_the_standards_ask_for() {
    if !have("linux.uml", "user-mode-linux") || !have("iscsi-test-cu", "libiscsi-bin") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let modules = [
        "configfs",
        "sd_mod",
        "sg",
        "uio",
        "target_core_user",
        "tcm_loop",
    ];
    assert_eq!(
        run_in_user_mode(dir.path(), &modules, JOB),
        [
            "small: 230 tests",
            // The test asks for the status of a block, and expects that of the first block of the
            // next physical block.
            "fails: GetLBAStatus.UnmapSingle",
            NOT_THERE,
            "large: 230 tests",
            // The test writes 257 blocks at once, one more than tcm_loop takes.
            "fails: GetLBAStatus.UnmapSingle",
            NOT_THERE,
            "daemon: status 0",
            "check of small.img: status 0",
            "check of large.img: status 0",
        ]
    );
}
