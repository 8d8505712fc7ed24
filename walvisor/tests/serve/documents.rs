//! The systemd units and libvirt domains in `docs/nbd` and `docs/vhost-user`, checked by the
//! programs they are for.

use std::fs;
use std::path::Path;

use walvisor_tests::have;

use super::{WALVISOR, client};

const DOCUMENTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs");
const DOORS: [&str; 2] = ["nbd", "vhost-user"];

#[test]
fn systemd_accepts_the_units() {
    if !have("systemd-analyze", "systemd") {
        return;
    }
    for door in DOORS {
        let dir = tempfile::tempdir().unwrap();
        let units = ["socket", "service"].map(|kind| format!("walvisor-{door}.{kind}"));
        for name in &units {
            let text = fs::read_to_string(Path::new(DOCUMENTS).join(door).join(name)).unwrap();
            // systemd-analyze checks that the program exists.
            let text = text.replace("/usr/local/bin/walvisor", WALVISOR);
            fs::write(dir.path().join(name), text).unwrap();
        }
        let pool = Path::new(DOCUMENTS).join("operations/walvisor@.service");
        let text = fs::read_to_string(pool).unwrap();
        let text = text.replace("/usr/local/bin/walvisor", WALVISOR);
        fs::write(dir.path().join("walvisor@pool.service"), text).unwrap();
        let units = units.map(|name| format!("./{name}"));
        // The manual pages that the units name need not be installed.
        let arguments = [
            "verify",
            "--man=no",
            &units[0],
            &units[1],
            "./walvisor@pool.service",
        ];
        client(dir.path(), "systemd-analyze", &arguments);
    }
}

#[test]
fn libvirt_accepts_the_domains() {
    if !have("virt-xml-validate", "libvirt-clients") || !have("xmllint", "libxml2-utils") {
        return;
    }
    for door in DOORS {
        let domain = ["libvirt-domain.xml", "domain"];
        client(
            &Path::new(DOCUMENTS).join(door),
            "virt-xml-validate",
            &domain,
        );
    }
}
