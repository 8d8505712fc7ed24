//! Keys and values on a disk of the store, in a log of this program's own: `kv DISK`, `kv DISK KEY`, `kv DISK KEY VALUE`.
//!
//! ```text
//!   sector  0          1          3          4
//!           [ record ] [ record          ]  [ record ] [ zeroes: the end
//!             key length, value length (4 bytes each, little-endian), key, value, zeroes up to the next sector
//! ```
//! A record needs no checksum, and no second copy: a write of the store is all-or-nothing, and after a crash the disk
//! holds a prefix of the writes. So the first sector of zeroes is the end, and what is before it is whole. A pair is
//! stable once [`KeyValue::put`] returns. Of a key that was put more than once the last record counts.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, poll};
use walvisor_storage::{
    Backend, BackendQueue, Buffer, DiskOptions, Operation, Port, SECTOR_SIZE, Store, StoreOptions,
    create_disk, default_log_dir,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Bytes of a new disk. It is sparse.
const DISK_BYTES: u64 = 64 << 20;
const HEADER_LEN: usize = 8;

/// An open disk with what it holds.
struct KeyValue {
    /// Dropped before the store.
    port: Port,
    store: Store,
    pairs: BTreeMap<String, String>,
    /// The sector after the last record.
    end: u64,
}

impl KeyValue {
    /// Opens the disk at `path`, or makes it, and reads its records.
    fn open(path: &Path) -> Result<Self> {
        let (log, options) = (default_log_dir(path), StoreOptions::default());
        if !path.exists() {
            create_disk(path, DISK_BYTES, &log, &options)?;
        }
        let store = Store::open(&log, &[DiskOptions::new(path)], &options)?;
        let disk = &store.disks()[0];
        let (port, sectors) = (disk.open_port()?, disk.sectors());
        let mut opened = Self {
            port,
            store,
            pairs: BTreeMap::new(),
            end: 0,
        };
        while opened.end < sectors && opened.read_record()? {}
        Ok(opened)
    }

    /// Reads the record at the end of those that were read before; `false`: there is none.
    fn read_record(&mut self) -> Result<bool> {
        let header = self.read(1)?;
        let len = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| header[at + i])) as usize;
        let (key_len, value_len) = (len(0), len(4));
        if key_len == 0 {
            return Ok(false);
        }
        let record_len = HEADER_LEN + key_len + value_len;
        let sectors = (record_len as u64).div_ceil(SECTOR_SIZE);
        let record = self.read(sectors.try_into()?)?;
        let (key, value) = record[HEADER_LEN..record_len].split_at(key_len);
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec());
        self.pairs.insert(text(key)?, text(value)?);
        self.end += sectors;
        Ok(true)
    }

    /// Reads at the end of the records that were read before.
    fn read(&mut self, sectors: u32) -> Result<Buffer> {
        let sector = self.end;
        let data = self.run(Operation::Read { sector, sectors })?;
        Ok(data.expect("a READ completes with data"))
    }

    /// Adds a pair, or gives `key` another value. It is stable when this returns.
    fn put(&mut self, key: &str, value: &str) -> Result<()> {
        if key.is_empty() {
            return Err("a key has at least one character".into());
        }
        let mut record = Vec::new();
        for text in [key, value] {
            record.extend(u32::try_from(text.len())?.to_le_bytes());
        }
        record.extend([key.as_bytes(), value.as_bytes()].concat());
        record.resize(record.len().next_multiple_of(SECTOR_SIZE as usize), 0);
        let data = Buffer::from(&record[..]);
        let sector = self.end;
        self.run(Operation::Write { sector, data })?;
        self.end += record.len() as u64 / SECTOR_SIZE;
        self.run(Operation::Flush)?;
        self.pairs.insert(key.to_owned(), value.to_owned());
        Ok(())
    }

    /// Makes one request and waits for its end. A program with many requests gives each a token of its own, submits
    /// several, then calls `kick` once.
    fn run(&mut self, operation: Operation) -> Result<Option<Buffer>> {
        self.port.submit(0, operation);
        self.port.kick();
        let mut done = Vec::new();
        loop {
            self.port.completions(&mut done);
            if let Some(completion) = done.pop() {
                return Ok(completion.result?);
            }
            poll(&mut [PollFd::new(&self.port.event(), PollFlags::IN)], None)?;
        }
    }

    /// Copies the log to the image, which is then a plain raw image.
    fn close(self) -> Result<()> {
        drop(self.port);
        Ok(self.store.close()?)
    }
}

/// What the command line asks for, as the text to print.
fn command(arguments: &[String]) -> Result<String> {
    let (path, rest) = arguments
        .split_first()
        .ok_or("usage: kv DISK [KEY [VALUE]]")?;
    let mut opened = KeyValue::open(path.as_ref())?;
    let answer = match rest {
        [] => {
            let lines = opened.pairs.iter();
            lines
                .map(|(key, value)| format!("{key}={value}\n"))
                .collect()
        }
        [key] => {
            let value = opened.pairs.get(key);
            let value = value.ok_or_else(|| format!("{path} has no key {key:?}"))?;
            format!("{value}\n")
        }
        [key, value] => {
            opened.put(key, value)?;
            String::new()
        }
        _ => return Err("usage: kv DISK [KEY [VALUE]]".into()),
    };
    opened.close()?;
    Ok(answer)
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    print!("{}", command(&arguments)?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_found_again_and_the_last_value_of_a_key_counts() {
        let place = tempfile::tempdir().unwrap();
        let disk = place.path().join("pairs.img").display().to_string();
        let kv = |words: &[&str]| {
            let all = [&[&disk[..]], words].concat();
            command(&all.into_iter().map(str::to_owned).collect::<Vec<_>>())
        };
        assert_eq!(kv(&[]).unwrap(), "");
        // The second record takes several sectors, and ends exactly at the end of one.
        let long = "x".repeat(4 * 512 - HEADER_LEN - "text".len());
        for (key, value) in [
            ("colour", "green"),
            ("text", &long),
            ("colour", "blue"),
            ("no value", ""),
        ] {
            assert_eq!(kv(&[key, value]).unwrap(), "");
        }
        assert_eq!(kv(&["colour"]).unwrap(), "blue\n");
        assert_eq!(
            kv(&[]).unwrap(),
            format!("colour=blue\nno value=\ntext={long}\n")
        );
        for (wrong, why) in [
            (&["smell"][..], "has no key \"smell\""),
            (&["", "value"], "at least one character"),
            (&["a", "b", "c"], "usage"),
        ] {
            let error = kv(wrong).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn a_full_disk_takes_no_more_and_keeps_what_it_has() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("pairs.img");
        let (log, options) = (default_log_dir(&path), StoreOptions::default());
        create_disk(&path, 4 * SECTOR_SIZE, &log, &options).unwrap();
        let mut opened = KeyValue::open(&path).unwrap();
        for key in ["a", "b", "c", "d"] {
            opened.put(key, "1").unwrap();
        }
        let error = opened.put("e", "1").unwrap_err().to_string();
        assert!(error.contains("beyond the disk"), "{error}");
        opened.close().unwrap();
        let opened = KeyValue::open(&path).unwrap();
        let keys: Vec<_> = opened.pairs.keys().cloned().collect();
        assert_eq!(keys, ["a", "b", "c", "d"]);
    }
}
