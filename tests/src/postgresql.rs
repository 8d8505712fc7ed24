//! PostgreSQL of Debian 12, for guests over the files of this machine.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::process::Command;

use tempfile::TempDir;

/// Programs that [`prepare`] and the guests need, with their packages. The search path has no
/// directory with PostgreSQL's.
pub const NEEDS: [(&str, &str); 3] = [
    (INITDB, "postgresql-15"),
    ("setpriv", "util-linux"),
    ("cc", "gcc"),
];
const INITDB: &str = "/usr/lib/postgresql/15/bin/initdb";
/// Debian's user and group without any rights.
const NOBODY: u32 = 65534;

/// Makes a directory with `db`, a new database cluster, and `direct.so`, the library of `direct.c`.
/// With this library the server writes its tables and indexes with `O_DIRECT`. Without it the
/// server writes through the guest's page cache, and Linux may send the two halves of a page in two
/// requests. `options` are further ones of `initdb`, which takes seconds in a guest, and less than
/// one here.
///
/// # Errors
/// A file cannot be written, or a program does not start or fails.
pub fn prepare(options: &[&str]) -> io::Result<TempDir> {
    // initdb does not run as root, and the user that runs it must reach its directory.
    let place = tempfile::Builder::new()
        .permissions(Permissions::from_mode(0o755))
        .tempdir()?;
    let db = place.path().join("db");
    fs::create_dir(&db)?;
    let mut initdb = Command::new(INITDB);
    initdb
        .args(["--username=postgres", "--auth=trust", "--no-locale"])
        .args(["--no-sync", "--no-instructions"])
        .args(options)
        .arg(&db);
    if rustix::process::geteuid().is_root() {
        chown(&db, Some(NOBODY), Some(NOBODY))?;
        initdb.current_dir("/").uid(NOBODY).gid(NOBODY);
    }
    run(&mut initdb)?;
    let source = place.path().join("direct.c");
    fs::write(&source, include_str!("../scripts/direct.c"))?;
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-shared", "-fPIC", "-o"]);
    run(cc.arg(place.path().join("direct.so")).arg(&source))?;
    Ok(place)
}

fn run(command: &mut Command) -> io::Result<()> {
    let output = command.output()?;
    if output.status.success() {
        return Ok(());
    }
    let program = command.get_program().display();
    let errors = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("{program}: {}", errors.trim())))
}
