//! The distribution's kernel: the ELF inside its bzImage, and the modules that a guest must load,
//! in order.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::{Error, FileContext, Result};
use crate::process::{command_text, program_error};

/// Offsets in the x86 boot protocol's setup header (Documentation/arch/x86/boot.rst of the kernel).
const SETUP_SECTORS: usize = 0x1f1;
const HEADER_MAGIC: usize = 0x202;
const PROTOCOL_VERSION: usize = 0x206;
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24c;

/// Decompresses the ELF kernel (vmlinux) in a bzImage.
///
/// # Errors
/// `image` is not a bzImage, or its compression is not supported here.
pub(crate) fn extract_vmlinux(image: &[u8]) -> Result<Vec<u8>> {
    let bad = |reason: &str| Error::Unusable(format!("the kernel package's vmlinuz {reason}"));
    if image.get(HEADER_MAGIC..HEADER_MAGIC + 4) != Some(b"HdrS") {
        return Err(bad("is not a bzImage (no HdrS at 0x202)"));
    }
    let word = |at: usize| -> Result<usize> {
        let bytes = image.get(at..at + 4).ok_or_else(|| bad("is truncated"))?;
        Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize)
    };
    if word(PROTOCOL_VERSION)? & 0xffff < 0x208 {
        return Err(bad(
            "is older than boot protocol 2.08 and does not say where its payload is",
        ));
    }
    let setup_sectors = match image[SETUP_SECTORS] {
        0 => 4,
        sectors => usize::from(sectors),
    };
    let start = (setup_sectors + 1) * 512 + word(PAYLOAD_OFFSET)?;
    let payload = start
        .checked_add(word(PAYLOAD_LENGTH)?)
        .and_then(|end| image.get(start..end))
        .ok_or_else(|| bad("is truncated"))?;
    // The build appends the uncompressed length to the compressed stream.
    let (stream, length) = payload.split_at(payload.len().saturating_sub(4));
    let vmlinux = decompress(stream)?;
    if !vmlinux.starts_with(b"\x7fELF") {
        return Err(bad("does not contain an ELF kernel"));
    }
    if length != u32::try_from(vmlinux.len()).unwrap_or(0).to_le_bytes() {
        return Err(bad("contains a kernel of another length than it says"));
    }
    Ok(vmlinux)
}

/// Decompresses `data` if it is in a format that kernels and modules use; otherwise returns it
/// unchanged.
fn decompress(data: &[u8]) -> Result<Vec<u8>> {
    let (program, arguments): (&str, &[&str]) = match data {
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => ("xz", &["-dc", "--single-stream"]),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => ("zstd", &["-dc", "-q"]),
        [0x1f, 0x8b, ..] => ("gzip", &["-dc"]),
        [0x02, 0x21, 0x4c, 0x18, ..] => ("lz4", &["-dc", "-q"]),
        _ => return Ok(data.to_vec()),
    };
    let mut command = Command::new(program);
    command
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|source| Error::Start {
        command: command_text(&command),
        source,
    })?;
    let mut stdin = child
        .stdin
        .take()
        .ok_or_else(|| Error::Unusable("no pipe".to_owned()))?;
    let output = std::thread::scope(|scope| {
        // A broken pipe means that the program has ended. Its status and message say why.
        scope.spawn(move || drop(stdin.write_all(data)));
        child.wait_with_output()
    })
    .at("read the output of", program)?;
    if output.status.success() {
        Ok(output.stdout)
    } else {
        Err(program_error(&command, output.status, &output.stderr))
    }
}

/// The modules of a kernel, in its unpacked package.
pub(crate) struct Modules {
    files: BTreeMap<String, PathBuf>,
    builtin: BTreeSet<String>,
}

impl Modules {
    /// Finds every module below `root/lib/modules` or `root/usr/lib/modules`.
    ///
    /// # Errors
    /// There is no module directory.
    pub(crate) fn find(root: &Path) -> Result<Self> {
        let tree = ["lib/modules", "usr/lib/modules"]
            .iter()
            .map(|path| root.join(path))
            .find(|path| path.is_dir())
            .ok_or_else(|| Error::Unusable("the kernel package has no modules".to_owned()))?;
        let mut modules = Self {
            files: BTreeMap::new(),
            builtin: BTreeSet::new(),
        };
        modules.walk(&tree)?;
        Ok(modules)
    }

    fn walk(&mut self, directory: &Path) -> Result<()> {
        for entry in fs::read_dir(directory).at("read", directory)? {
            let path = entry.at("read", directory)?.path();
            let name = path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            if path.is_dir() && !path.is_symlink() {
                self.walk(&path)?;
            } else if name == "modules.builtin" {
                let list = fs::read_to_string(&path).at("read", &path)?;
                self.builtin.extend(list.lines().filter_map(module_name));
            } else if let Some(module) = module_name(&name) {
                self.files.insert(module, path);
            }
        }
        Ok(())
    }

    /// The modules `wanted` and their dependencies, uncompressed, each after those it depends on.
    /// Modules built into the kernel are left out.
    ///
    /// # Errors
    /// A module does not exist.
    pub(crate) fn load_order(&self, wanted: &[&str]) -> Result<Vec<(String, Vec<u8>)>> {
        let mut order = Vec::new();
        let mut seen = BTreeSet::new();
        for module in wanted {
            self.visit(module, &mut seen, &mut order)?;
        }
        Ok(order)
    }

    fn visit(
        &self,
        module: &str,
        seen: &mut BTreeSet<String>,
        order: &mut Vec<(String, Vec<u8>)>,
    ) -> Result<()> {
        let module = module.replace('-', "_");
        if self.builtin.contains(&module) || !seen.insert(module.clone()) {
            return Ok(());
        }
        let path = self
            .files
            .get(&module)
            .ok_or_else(|| Error::Unusable(format!("the kernel package has no module {module}")))?;
        let content = decompress(&fs::read(path).at("read", path)?)?;
        for dependency in dependencies(&content) {
            self.visit(&dependency, seen, order)?;
        }
        order.push((module, content));
        Ok(())
    }
}

/// `kernel/arch/x86/kvm/kvm-amd.ko.xz` is module `kvm_amd`.
fn module_name(path: &str) -> Option<String> {
    let name = path.rsplit('/').next()?;
    let stem = [".ko", ".ko.xz", ".ko.zst", ".ko.gz"]
        .iter()
        .find_map(|suffix| name.strip_suffix(suffix))?;
    Some(stem.replace('-', "_"))
}

/// Reads the `depends=` string of a module's .modinfo section, which consists of zero-terminated
/// strings.
fn dependencies(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(start) = module.windows(KEY.len()).position(|window| window == KEY) else {
        return Vec::new();
    };
    let value = module[start + KEY.len()..]
        .split(|byte| *byte == 0)
        .next()
        .unwrap_or_default();
    String::from_utf8_lossy(value)
        .split(',')
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bzimage(payload: &[u8], length: u32) -> Vec<u8> {
        let mut image = vec![0; 1024];
        image[SETUP_SECTORS] = 1;
        image[HEADER_MAGIC..HEADER_MAGIC + 4].copy_from_slice(b"HdrS");
        image[PROTOCOL_VERSION] = 0x0f;
        image[PROTOCOL_VERSION + 1] = 0x02;
        let total = u32::try_from(payload.len() + 4).unwrap();
        image[PAYLOAD_LENGTH..PAYLOAD_LENGTH + 4].copy_from_slice(&total.to_le_bytes());
        image.extend_from_slice(payload);
        image.extend_from_slice(&length.to_le_bytes());
        image
    }

    #[test]
    fn the_payload_is_extracted_and_its_length_checked() {
        let elf = b"\x7fELF and the rest";
        let length = u32::try_from(elf.len()).unwrap();
        assert_eq!(extract_vmlinux(&bzimage(elf, length)).unwrap(), elf);
        let error = extract_vmlinux(&bzimage(elf, length + 1)).unwrap_err();
        assert!(error.to_string().contains("another length"), "{error}");
    }

    #[test]
    fn damaged_images_are_refused() {
        assert!(extract_vmlinux(b"").is_err());
        assert!(extract_vmlinux(&[0; 4096]).is_err());
        let image = bzimage(b"\x7fELF", 4);
        assert!(extract_vmlinux(&image[..image.len() - 1]).is_err());
        assert!(extract_vmlinux(&bzimage(b"no elf", 6)).is_err());
    }

    #[test]
    fn modules_are_loaded_after_what_they_depend_on() {
        let tree = tempfile::tempdir().unwrap();
        let directory = tree.path().join("lib/modules/1/kernel");
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("kvm-amd.ko"), b"x\0depends=kvm,ccp\0y").unwrap();
        fs::write(directory.join("kvm.ko"), b"x\0depends=irqbypass\0y").unwrap();
        fs::write(directory.join("irqbypass.ko"), b"x\0depends=\0y").unwrap();
        fs::write(
            directory.join("../modules.builtin"),
            "kernel/drivers/ccp.ko\n",
        )
        .unwrap();
        let modules = Modules::find(tree.path()).unwrap();
        let order = modules.load_order(&["kvm-amd", "kvm"]).unwrap();
        let names: Vec<_> = order.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["irqbypass", "kvm", "kvm_amd"]);
        assert!(modules.load_order(&["nonsense"]).is_err());
    }
}
