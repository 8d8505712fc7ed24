//! The units and the domain in `docs/nbd`, read by the programs that they are for.

use std::fs;
use std::path::Path;

use super::{WALVISOR, client, has};

const DOCUMENTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/nbd");

#[test]
fn systemd_takes_the_units() {
    if !has("systemd-analyze", "systemd") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for name in ["walvisor-nbd.socket", "walvisor-nbd.service"] {
        let text = fs::read_to_string(Path::new(DOCUMENTS).join(name)).unwrap();
        // It is looked for.
        let text = text.replace("/usr/local/bin/walvisor", WALVISOR);
        fs::write(dir.path().join(name), text).unwrap();
    }
    let units = ["verify", "./walvisor-nbd.socket", "./walvisor-nbd.service"];
    client(dir.path(), "systemd-analyze", &units);
}

#[test]
fn libvirt_takes_the_domain() {
    if !has("virt-xml-validate", "libvirt-clients") || !has("xmllint", "libxml2-utils") {
        return;
    }
    let domain = ["libvirt-domain.xml", "domain"];
    client(Path::new(DOCUMENTS), "virt-xml-validate", &domain);
}
