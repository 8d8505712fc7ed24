//! A backup of a disk that is not in use: `backup IMAGE COPY`. An earlier copy is replaced once the
//! new one is whole.

use std::{error::Error, path::Path};

use walvisor_storage::{Transfer, default_log_dir, export_disk};

pub(crate) fn backup(image: &Path, copy: &Path) -> Result<Transfer, Box<dyn Error>> {
    let log = default_log_dir(image);
    let progress = &mut |done, size| eprint!("\r{done} of {size} bytes");
    let done = export_disk(image, &log, copy, true, None, progress)?;
    eprintln!();
    Ok(done)
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let [image, copy] = &arguments[..] else {
        return Err("usage: backup IMAGE COPY".into());
    };
    let done = backup(image.as_ref(), copy.as_ref())?;
    println!("{} bytes copied, the rest are holes", done.copied);
    Ok(())
}
