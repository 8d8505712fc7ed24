//! Detecting images in formats other than raw, by their first bytes.
//!
//! A guest may write such bytes to its disk too: encrypting a whole disk writes a LUKS header. So
//! only an image that is not a disk on a log yet is suspicious.

use std::path::Path;

use crate::catalog::options::ImageFormat;
use crate::error::{Error, Result, invalid};
use crate::medium::filesystem::{OpenMode, files};
use crate::medium::mark::ImageMark;

/// How many bytes decide.
const HEAD: u64 = 512;

/// The formats: offset and value of the magic, and the name.
const FORMATS: [(usize, &[u8], &str); 9] = [
    (0, b"QFI\xfb", "qcow2"),
    (0, b"KDMV", "VMDK"),
    (0, b"COWD", "VMDK"),
    (0, b"# Disk DescriptorFile", "VMDK"),
    (0x40, b"\x7f\x10\xda\xbe", "VDI"),
    (0, b"vhdxfile", "VHDX"),
    (0, b"conectix", "VHD"),
    (0, b"QED\0", "QED"),
    (0, LUKS, "LUKS"),
];

const LUKS: &[u8] = b"LUKS\xba\xbe";

/// Refuses an image without a mark that starts like another format, unless it is known to be raw.
/// The image is open and locked.
pub(crate) fn refuse_other_format(
    path: &Path,
    mark: Option<&ImageMark>,
    format: ImageFormat,
) -> Result<()> {
    if mark.is_some() || format == ImageFormat::Raw {
        return Ok(());
    }
    let read = || {
        // Through the page cache, because a short file may not have a whole sector.
        let file = files().open(path, OpenMode::Read)?;
        let mut head = vec![0; file.len()?.min(HEAD) as usize];
        file.read_exact_at(&mut head, 0)?;
        Ok(head)
    };
    let head = read().map_err(|error| Error::io("read the image", path, error))?;
    let begins = |(at, magic, _): &&(usize, &[u8], &str)| {
        head.get(*at..).is_some_and(|head| head.starts_with(magic))
    };
    let Some((_, magic, name)) = FORMATS.iter().find(begins) else {
        return Ok(());
    };
    let path = path.display();
    let source = if *magic == LUKS {
        format!(
            "--object secret,id=key,file=KEYFILE --image-opts \
             driver=luks,key-secret=key,file.filename={path}"
        )
    } else {
        path.to_string()
    };
    Err(invalid(format!(
        "{path}: starts like a {name} image, and disks are raw images; convert it with 'qemu-img \
         convert -O raw {source} NEW', or, if these are the first bytes of the disk itself, say \
         so: format=raw with --disk, --format raw with 'disk import'"
    )))
}
