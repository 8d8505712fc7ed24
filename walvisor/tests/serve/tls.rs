//! TLS with third-party clients: both sides check certificates, and a client without TLS learns
//! nothing.

use std::fs;
use std::io::Write;
use std::net::TcpStream;
use std::path::Path;

use walvisor_testkit::nbd::RawClient;
use walvisor_tests::{have, run_sessions};

use super::{
    Daemon, assert_says, client, create, errors, refused, run_client, serve_telling, test_dir, text,
};

const STARTTLS: u32 = 5;
const TLS_REQUIRED: u32 = (1 << 31) + 5;

#[track_caller]
fn certtool(dir: &Path, arguments: &str) {
    let words: Vec<_> = arguments.split_whitespace().collect();
    client(dir, "certtool", &words);
}

/// Makes a CA in `dir`/pki with a server's and a client's certificate, under the names that QEMU
/// and libnbd look for; and another CA with a client of its own in `dir`/other, if that is wanted.
/// `false`: certtool is missing.
fn certificates(dir: &Path, other: bool) -> bool {
    if !have("certtool", "gnutls-bin") {
        return false;
    }
    for name in if other {
        &["pki", "other"][..]
    } else {
        &["pki"]
    } {
        let at = dir.join(name);
        fs::create_dir(&at).unwrap();
        let certtool = |arguments: &str| certtool(&at, arguments);
        for (role, template) in [
            ("ca", "cn = CA\nca\ncert_signing_key\ncrl_signing_key\n"),
            (
                "server",
                "cn = localhost\ndns_name = localhost\nip_address = \
                 127.0.0.1\ntls_www_server\nsigning_key\n",
            ),
            ("client", "cn = client\ntls_www_client\nsigning_key\n"),
        ] {
            fs::write(at.join(format!("{role}.info")), template).unwrap();
            // Not ECDSA: half of the keys that GnuTLS 3.7 generates have a byte too many, and
            // rustls refuses those.
            certtool(&format!(
                "--generate-privkey --key-type=rsa --bits=2048 --outfile {role}-key.pem"
            ));
            let kind = match role {
                "ca" => "--generate-self-signed",
                _ => {
                    "--generate-certificate --load-ca-certificate ca-cert.pem --load-ca-privkey \
                      ca-key.pem"
                }
            };
            certtool(&format!(
                "{kind} --load-privkey {role}-key.pem --template {role}.info --outfile \
                 {role}-cert.pem"
            ));
        }
    }
    // The client in `other` trusts the server's CA, but that CA has not signed the client's
    // certificate.
    if other {
        fs::copy(dir.join("pki/ca-cert.pem"), dir.join("other/ca-cert.pem")).unwrap();
    }
    true
}

/// Runs a script after `connect`, with the certificates in `pki`, or without TLS if that is empty.
/// Returns its output.
fn nbdsh(dir: &Path, pki: &str, connect: &str, script: &str) -> Result<String, String> {
    let setting = match pki {
        "" => String::new(),
        pki => format!("h.set_tls(nbd.TLS_REQUIRE); h.set_tls_certificates('{pki}')\n"),
    };
    let script = format!("{setting}{connect}\n{script}");
    let output = run_client(dir, "nbdsh", &["-c", &script]);
    if output.status.success() {
        Ok(text(&output.stdout))
    } else {
        Err(text(&output.stderr))
    }
}

const TO_SOCKET: &str = "h.connect_unix('s')";

#[test]
fn third_party_clients_encrypt() {
    let dir = &test_dir();
    if !certificates(dir, true)
        || !have("nbdsh", "python3-libnbd")
        || !have("qemu-img", "qemu-utils")
    {
        return;
    }
    create(dir, "disk.img", "64M");
    let daemon = Daemon::start(
        dir,
        "--disk path=disk.img,port=0 --tls-certificates pki --tls-verify-peer",
    );
    let uri = daemon.uri();
    let address = uri.strip_prefix("nbds://127.0.0.1:").expect(uri);
    let (port, _) = address.split_once('/').unwrap();
    let connect = format!("h.connect_tcp('localhost', '{port}')");
    // The data is longer than all TLS buffers, in both directions, and requests run concurrently.
    let script = "
import os
assert h.get_tls_negotiated()
data = os.urandom(32 << 20)
h.set_strict_mode(0)
h.pwrite(data, 4096)
assert h.pread(32 << 20, 4096) == data
bufs = [nbd.Buffer.from_bytearray(bytearray(data[n << 20:(n + 1) << 20])) for n in range(32)]
cookies = [h.aio_pwrite(buf, (n << 20) + (1 << 20)) for n, buf in enumerate(bufs)]
while h.aio_in_flight() > 0:
    h.poll(-1)
assert all(h.aio_command_completed(cookie) for cookie in cookies)
h.flush()
assert h.pread(32 << 20, 1 << 20) == data
h.shutdown()
";
    nbdsh(dir, "pki", &connect, script).unwrap();
    fs::create_dir(dir.join("bare")).unwrap();
    fs::copy(dir.join("pki/ca-cert.pem"), dir.join("bare/ca-cert.pem")).unwrap();
    let error = nbdsh(dir, "", &connect, "h.pread(512, 0)").unwrap_err();
    assert!(error.contains("requires TLS"), "{error}");
    // A client without a certificate, and one whose certificate another CA has signed.
    for pki in ["bare", "other"] {
        let error = nbdsh(dir, pki, &connect, "h.pread(512, 0)").unwrap_err();
        assert!(
            error.contains("TLS") || error.contains("gnutls"),
            "{pki}: {error}"
        );
    }
    let object = "tls-creds-x509,id=tls0,endpoint=client,dir=pki,verify-peer=yes";
    let disk = format!("driver=nbd,host=localhost,port={port},export=disk.img,tls-creds=tls0");
    let image = ["--object", object, "--image-opts", &disk];
    let commands = ["-c", "write -P 7 0 2M", "-c", "read -P 7 0 2M"];
    let output = run_client(dir, "qemu-io", &[image, commands].concat());
    assert!(output.status.success(), "{output:?}");
    assert!(!text(&output.stdout).contains("fail"), "{output:?}");
    let info = [&["info"], &image[..]].concat();
    let output = run_client(dir, "qemu-img", &info);
    assert!(text(&output.stdout).contains("64 MiB"), "{output:?}");
    let errors = daemon.stop();
    // One line for each rejected client.
    assert_eq!(errors.lines().count(), 2, "{errors}");
    let image = fs::read(dir.join("disk.img")).unwrap();
    assert!(image[..2 << 20].iter().all(|&byte| byte == 7));
}

#[test]
fn a_client_without_tls_learns_nothing() {
    let dir = &test_dir();
    if !certificates(dir, true) || !have("nbdsh", "python3-libnbd") {
        return;
    }
    create(dir, "disk.img", "1M");
    let serve = "--disk path=disk.img,socket=s --tls-certificates pki";
    let read = "assert h.pread(512, 0) == bytes(512)";

    let daemon = Daemon::start(dir, serve);
    let mut client = RawClient::greet(&dir.join("s"));
    // LIST, INFO, GO, STRUCTURED_REPLY, LIST_META_CONTEXT, SET_META_CONTEXT, EXTENDED_HEADERS, and
    // an unknown option.
    for option in [3, 6, 7, 8, 9, 10, 11, 77] {
        client.option(option, &[]);
        let (of, kind, why) = client.option_reply();
        assert_eq!((of, kind), (option, TLS_REQUIRED), "{}", text(&why));
    }
    client.option(1, b"disk.img");
    assert!(client.is_closed());
    // In the middle of a TLS handshake one client sends garbage, and another leaves.
    let mut client = RawClient::greet(&dir.join("s"));
    client.option(STARTTLS, &[]);
    assert_eq!(client.option_reply(), (STARTTLS, 1, vec![]));
    client.send(&[0x55; 100]);
    assert!(client.is_closed());
    let mut client = RawClient::greet(&dir.join("s"));
    client.option(STARTTLS, &[]);
    assert_eq!(client.option_reply(), (STARTTLS, 1, vec![]));
    drop(client);
    // Without --tls-verify-peer any client will do.
    nbdsh(dir, "other", TO_SOCKET, read).unwrap();
    let idle = {
        // This client is still in its handshake when the server stops.
        let mut client = RawClient::greet(&dir.join("s"));
        client.option(STARTTLS, &[]);
        client.option_reply();
        client
    };
    let errors = daemon.stop();
    assert_says(&errors, &["without TLS", "TLS: "]);
    drop(idle);

    let daemon = Daemon::start(dir, &format!("{serve} --tls on"));
    assert!(daemon.uri().starts_with("nbd+unix:"));
    nbdsh(dir, "pki", TO_SOCKET, read).unwrap();
    nbdsh(dir, "", TO_SOCKET, read).unwrap();
    assert_eq!(daemon.stop(), "");
}

#[test]
fn a_revoked_certificate_is_refused() {
    let dir = &test_dir();
    if !certificates(dir, false) || !have("nbdsh", "python3-libnbd") {
        return;
    }
    create(dir, "disk.img", "1M");
    let serve = "--disk path=disk.img,socket=s --tls-certificates pki --tls-verify-peer";
    let read = "assert h.pread(512, 0) == bytes(512)";
    let pki = dir.join("pki");
    fs::write(pki.join("crl.info"), "crl_number = 1\n").unwrap();
    // The list revokes no certificate, then the server's, then the client's.
    for (revoked, admitted) in [
        ("", true),
        (" --load-certificate server-cert.pem", true),
        (" --load-certificate client-cert.pem", false),
    ] {
        certtool(
            &pki,
            &format!(
                "--generate-crl --load-ca-certificate ca-cert.pem --load-ca-privkey ca-key.pem \
                 --template crl.info --outfile ca-crl.pem{revoked}"
            ),
        );
        let daemon = Daemon::start(dir, serve);
        let result = nbdsh(dir, "pki", TO_SOCKET, read);
        assert_eq!(result.is_ok(), admitted, "{revoked}: {result:?}");
        let errors = daemon.stop();
        assert_eq!(errors.contains("Revoked"), !admitted, "{errors}");
        assert_eq!(errors.lines().count(), usize::from(!admitted), "{errors}");
    }
    // An invalid list must be an error, lest it admit the clients on it.
    for content in [
        "text",
        "-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n",
    ] {
        fs::write(pki.join("ca-crl.pem"), content).unwrap();
        refused(dir, &format!("serve nbd {serve}"), 1, &["pki/ca-crl.pem"]);
    }
}

#[test]
fn bad_certificates_are_one_line_errors() {
    let dir = &test_dir();
    if !certificates(dir, true) {
        return;
    }
    create(dir, "disk.img", "1M");
    for (name, file, content) in [
        ("none", "none", ""),
        ("empty", "server-key.pem", ""),
        (
            "garbage",
            "server-cert.pem",
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        ),
        ("no-ca", "ca-cert.pem", "text"),
        (
            "no-key",
            "server-key.pem",
            "-----BEGIN EC PRIVATE KEY-----\nAAAA\n-----END EC PRIVATE KEY-----\n",
        ),
    ] {
        let at = dir.join(name);
        fs::create_dir(&at).unwrap();
        if name != "none" {
            for file in ["ca-cert.pem", "server-cert.pem", "server-key.pem"] {
                fs::copy(dir.join("pki").join(file), at.join(file)).unwrap();
            }
        }
        fs::write(at.join(file), content).unwrap();
    }
    fs::create_dir(dir.join("mixed")).unwrap();
    for (from, file) in [("pki", "server-cert.pem"), ("other", "server-key.pem")] {
        fs::copy(dir.join(from).join(file), dir.join("mixed").join(file)).unwrap();
    }
    run_sessions("certificates", dir, []);
}

/// Someone who holds no certificate, and connects again and again.
#[test]
fn strangers_fill_no_log() {
    let dir = &test_dir();
    if !certificates(dir, false) {
        return;
    }
    create(dir, "disk.img", "1M");
    let arguments = "nbd --disk path=disk.img,port=0 --tls-certificates pki --tls-verify-peer";
    let daemon = serve_telling(dir, arguments, 1);
    let address = daemon.uri().strip_prefix("nbds://").expect("TLS");
    let (address, _) = address.split_once('/').unwrap();
    for number in 0..1500 {
        let mut socket = TcpStream::connect(address).unwrap();
        // Some say nothing, some garbage, and some ask for TLS and then say garbage.
        let _ = match number % 3 {
            0 => Ok(()),
            1 => socket.write_all(&[0xff; 64]),
            _ => socket.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x05\0\0\0\0garbage"),
        };
    }
    daemon.stop();
    let told = errors(dir);
    assert!(told.lines().count() < 60, "{told}");
    let counts = told.lines().filter_map(|line| {
        let (count, _) = line.split_once(" more like this in the last minute: ")?;
        count.split_whitespace().last()?.parse::<u64>().ok()
    });
    assert!(counts.sum::<u64>() > 300, "{told}");
}
