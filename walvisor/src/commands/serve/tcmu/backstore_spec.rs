//! The names and properties of the disks' back stores in the kernel's target.

use std::path::Path;

use walvisor_devices::backend::MAX_REQUEST_BYTES;

use crate::disk_spec::{DiskSpec, is_backstore_name};
use crate::disks;
use crate::lio::BackstoreSpec;
use crate::plan::real_path;

/// The properties of each disk's back store. Refuses disks with equal names.
pub(super) fn backstore_specs(specs: &[DiskSpec]) -> Result<Vec<BackstoreSpec>, String> {
    let mut all: Vec<BackstoreSpec> = Vec::new();
    for spec in specs {
        let image = match &spec.path {
            Some(path) => real_path(path).display().to_string(),
            None => "ram".to_owned(),
        };
        let name = backstore_name(spec)?;
        if all.iter().any(|other| other.name == name) {
            return Err(format!(
                "two disks are called '{name}': give one of them another name="
            ));
        }
        let serial = spec.serial.clone();
        all.push(BackstoreSpec {
            serial: serial.unwrap_or_else(|| format!("{:016x}", disks::identity(&name, &image))),
            name,
            image,
            block_size: spec.block_size,
            max_blocks: MAX_REQUEST_BYTES as u32 / spec.block_size,
            timeout: spec.command_timeout,
        });
    }
    Ok(all)
}

/// The name of a disk's back store: as given, or its image's file name without `.img`.
pub(super) fn backstore_name(spec: &DiskSpec) -> Result<String, String> {
    if let Some(name) = &spec.backstore {
        return Ok(name.clone());
    }
    let stem = spec.path.as_deref().and_then(Path::file_stem);
    let name = stem.map_or("ram".into(), |stem| stem.to_string_lossy());
    if is_backstore_name(&name) {
        Ok(name.into_owned())
    } else {
        Err(format!(
            "disk '{}': '{name}' is not a valid name for a back store: give a name=",
            spec.name()
        ))
    }
}

/// The target's name in its fabric: NAA 5, LIO's company id, and a number made from the disk's name
/// and image.
pub(super) fn wwn(spec: &DiskSpec, backstore: &BackstoreSpec) -> String {
    let own = disks::identity(&backstore.name, &backstore.image) & 0xf_ffff_ffff;
    spec.wwn
        .clone()
        .unwrap_or_else(|| format!("naa.5001405{own:09x}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk_spec::DiskCommand;

    fn parse(texts: &[&str]) -> Result<Vec<BackstoreSpec>, String> {
        let specs: Vec<DiskSpec> = texts
            .iter()
            .map(|text| DiskSpec::parse(text, DiskCommand::Tcmu).unwrap())
            .collect();
        backstore_specs(&specs)
    }

    #[test]
    fn each_disk_has_its_own_name_serial_and_wwn() {
        let disks = parse(&[
            "path=/x/a.img,block-size=4096",
            "path=/y/a.img,name=other,serial=S",
            "backend=ram,size=1M,fabric=vhost",
        ])
        .unwrap();
        let names: Vec<_> = disks.iter().map(|disk| disk.name.as_str()).collect();
        assert_eq!(names, ["a", "other", "ram"]);
        assert_eq!((disks[1].serial.as_str(), disks[0].serial.len()), ("S", 16));
        assert_ne!(disks[0].serial, disks[2].serial);
        assert_eq!(disks[0].max_blocks as usize * 4096, MAX_REQUEST_BYTES);
        let spec = DiskSpec::parse("path=/x/a.img", DiskCommand::Tcmu).unwrap();
        let first = wwn(&spec, &disks[0]);
        assert_eq!((first.len(), &first[..11]), (20, "naa.5001405"));
        assert_eq!(first, wwn(&spec, &disks[0]));
        assert_ne!(first, wwn(&spec, &disks[1]));
    }

    #[test]
    fn names_that_are_taken_or_invalid_are_refused() {
        for (texts, part) in [
            (&["path=x/a.img", "path=y/a.img"][..], "called 'a'"),
            (&["path=ä.img"], "give a name="),
        ] {
            let error = parse(texts).unwrap_err();
            assert!(error.contains(part), "{texts:?}: {error}");
        }
    }
}
