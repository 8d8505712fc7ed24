//! Which tests `make test` runs, and which `make guests`.

/// Tests that boot a kernel which is not ours, but for one of each kind, and tests of what is
/// installed and packed: beginnings of IDs. Together they take a few times as long as all others.
pub(crate) const GUESTS: &[&str] = &[
    "benches/reports/database::",
    "benches/reports/drbd::",
    "benches/reports/fsync::",
    "benches/reports/linux::",
    "benches/reports/notify::every_path",
    "tests/database/mariadb",
    "tests/database/postgresql",
    "tests/guests_jobs/",
    "tests/guests_linux/",
    "tests/guests_own/",
    "tests/guests_vhost_user/",
    "tests/install/",
    "tests/libguestfs/",
    "tests/nbd_kernel/",
    "tests/packs/",
    "tests/power_cut/ext4_and_",
    "tests/power_cut/no_page_is_torn",
    "tests/power_cut/xfs_and_",
    "tests/scsi_conformance/",
    "tests/tcmu_kernel/",
    "walvisor/archive/a_real_server",
];

/// A part of all tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tier {
    Test,
    Guests,
    All,
}

impl Tier {
    /// The tier that a command line names.
    pub(crate) fn parse(name: &str) -> Result<Self, String> {
        match name {
            "test" => Ok(Self::Test),
            "guests" => Ok(Self::Guests),
            "all" => Ok(Self::All),
            _ => Err(format!("--tier {name}: give test, guests or all")),
        }
    }

    /// Whether the tier has the test with this ID.
    pub(crate) fn has(self, id: &str) -> bool {
        let boots = GUESTS.iter().any(|start| id.starts_with(start));
        match self {
            Self::Test => !boots,
            Self::Guests => boots,
            Self::All => true,
        }
    }
}
