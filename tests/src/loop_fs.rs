//! File systems on loop devices.

use walvisor_testkit::process::run;
use walvisor_testkit::{own_mounts, unmount};

use crate::have;

/// A file system on a file. Dropping it unmounts and removes it.
pub struct LoopFs {
    dir: tempfile::TempDir,
}

impl LoopFs {
    /// Makes an XFS of 400 MiB, where files can share blocks, and mounts it. Returns `None` if that
    /// fails, after printing `skipped: why`.
    #[must_use]
    pub fn xfs() -> Option<Self> {
        if !have("mkfs.xfs", "xfsprogs") {
            return None;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let (image, place) = (dir.path().join("image"), dir.path().join("place"));
        let file = std::fs::File::create(&image).expect("a file");
        file.set_len(400 << 20).expect("a length");
        std::fs::create_dir(&place).expect("a directory");
        let made = Self { dir };
        let [image, point] = [&image, &place].map(|path| path.to_string_lossy());
        let mounted = own_mounts()
            .map_err(|error| error.to_string())
            .and_then(|()| run("mkfs.xfs", &["-q", "-m", "reflink=1", &image]))
            .and_then(|_| run("mount", &["-o", "loop", &image, &point]));
        match mounted {
            Ok(_) => Some(made),
            Err(why) => {
                println!("skipped: no XFS: {why}");
                None
            }
        }
    }

    /// The mount point.
    #[must_use]
    pub fn path(&self) -> std::path::PathBuf {
        self.dir.path().join("place")
    }
}

impl Drop for LoopFs {
    fn drop(&mut self) {
        unmount(&self.path());
    }
}
