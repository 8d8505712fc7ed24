//! The demo's result, as a table or JSON, and its first failure.

use std::fmt;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

use serde::Serialize;

use super::disks::ClosedImage;
use super::error::DemoError;
use super::listener::{Transcript, TransportJob};
use walvisor_guest::contract::{Digest, Outcome};

/// Bytes of a block of the guest's digest.
const BLOCK: usize = 4096;

/// The result of each transport's job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DemoReport {
    /// The transports, in the order of their jobs.
    pub transports: Vec<TransportReport>,
}

/// The result of one transport's job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TransportReport {
    /// `mmio` or `pci`.
    pub transport: String,
    /// Requests that the guest completed.
    pub requests: u64,
    /// Doorbells that the guest wrote.
    pub doorbells: u64,
    /// Exits to user space.
    pub exits: u64,
    /// Interrupts that reached the guest.
    pub interrupts: u64,
    /// FLUSH requests that the guest completed.
    pub flushes: u64,
    /// Syncs of the disk's log.
    pub syncs: u64,
    /// Bytes that the guest read and wrote.
    pub bytes: u64,
    /// Whether every byte that the guest read was right, and every byte of the disk's image
    /// afterwards.
    pub verified: bool,
    /// Duration of the job in microseconds.
    pub time_us: u64,
    /// The problem, if the job failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl DemoReport {
    /// The problem of the first transport that is not verified.
    pub fn failure(&self) -> Option<String> {
        let failed = self
            .transports
            .iter()
            .find(|transport| !transport.verified)?;
        let reason = failed.error.as_deref().unwrap_or("not verified");
        Some(format!("{}: {reason}", failed.transport))
    }
}

/// Makes the report from the guest's transcript and the images of its disks.
///
/// # Errors
/// If an image cannot be read.
pub(super) fn assemble(
    transcript: Transcript,
    images: &[ClosedImage],
) -> Result<DemoReport, DemoError> {
    let of_image = |image: &ClosedImage| {
        let job = transcript
            .jobs
            .iter()
            .find(|job| job.transport == image.name);
        of_transport(image, job)
    };
    Ok(DemoReport {
        transports: images.iter().map(of_image).collect::<Result<_, _>>()?,
    })
}

fn of_transport(
    image: &ClosedImage,
    job: Option<&TransportJob>,
) -> Result<TransportReport, DemoError> {
    let measured = job.and_then(|job| job.measured);
    let outcome = match job.map(|job| &job.outcome) {
        Some(Ok(outcome)) => Ok(*outcome),
        Some(Err(reason)) => Err(reason.clone()),
        None => Err("the guest did not report".to_owned()),
    };
    let error = match (&outcome, measured) {
        (Err(reason), _) => Some(reason.clone()),
        (Ok(_), None) => Some("the guest ended a job that it did not begin".to_owned()),
        (Ok(outcome), Some(measured)) if outcome.counts.requests != measured.requests => {
            Some(format!(
                "the guest completed {} requests, the device took {}",
                outcome.counts.requests, measured.requests
            ))
        }
        (Ok(outcome), Some(_)) => compare(&image.path, outcome)
            .map_err(|error| DemoError::Image(image.path.clone(), error))?,
    };
    let counts = outcome.unwrap_or_default().counts;
    Ok(TransportReport {
        transport: image.name.to_owned(),
        requests: counts.requests,
        doorbells: counts.doorbells,
        exits: measured.map_or(0, |measured| measured.exits.iter().sum()),
        interrupts: counts.interrupts,
        flushes: counts.flushes,
        syncs: measured.map_or(0, |measured| measured.syncs),
        bytes: counts.bytes,
        verified: error.is_none(),
        time_us: measured.map_or(0, |measured| measured.time.as_micros() as u64),
        error,
    })
}

/// Compares the blocks that the guest read last with those of the image. Returns the difference, if
/// there is one.
fn compare(path: &Path, outcome: &Outcome) -> io::Result<Option<String>> {
    let mut image = BufReader::with_capacity(1 << 20, File::open(path)?);
    let mut digest = Digest::default();
    let mut data = [0; BLOCK];
    for block in 0..outcome.blocks {
        image.read_exact(&mut data)?;
        digest.add(block, &data);
    }
    Ok((digest != outcome.digest)
        .then(|| "the image does not hold what the guest read last".to_owned()))
}

impl fmt::Display for DemoReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<9} {:>8} {:>9} {:>6} {:>10} {:>7} {:>6} {:>7} {:>7}  bytes verified",
            "transport",
            "requests",
            "doorbells",
            "exits",
            "interrupts",
            "flushes",
            "syncs",
            "MiB",
            "ms"
        )?;
        for row in &self.transports {
            writeln!(
                f,
                "{:<9} {:>8} {:>9} {:>6} {:>10} {:>7} {:>6} {:>7.1} {:>7.1}  {}",
                row.transport,
                row.requests,
                row.doorbells,
                row.exits,
                row.interrupts,
                row.flushes,
                row.syncs,
                row.bytes as f64 / f64::from(1 << 20),
                row.time_us as f64 / 1000.0,
                if row.verified { "all" } else { "NO" }
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::demo::listener::TransportJob;
    use crate::demo::recorder::Measurement;
    use walvisor_guest::contract::Counts;

    const COUNTS: Counts = Counts {
        requests: 9,
        doorbells: 3,
        interrupts: 2,
        flushes: 4,
        bytes: 8192,
    };
    const MEASURED: Measurement = Measurement {
        exits: [0, 0, 2, 3, 0, 0, 0],
        kvm_exits: None,
        requests: 9,
        syncs: 1,
        time: Duration::from_micros(1500),
        cpu: Duration::ZERO,
        host_cpu: None,
    };

    /// The report of a job on an image of two blocks; `change` may change the image and the
    /// reported job.
    fn report(change: impl FnOnce(&mut Vec<u8>, &mut TransportJob)) -> TransportReport {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        let mut data = vec![7; 2 * BLOCK];
        data[BLOCK..].fill(8);
        let mut digest = Digest::default();
        digest.add(0, &data[..BLOCK]);
        digest.add(1, &data[BLOCK..]);
        let mut job = TransportJob {
            transport: "mmio".to_owned(),
            outcome: Ok(Outcome {
                counts: COUNTS,
                blocks: 2,
                digest,
            }),
            measured: Some(MEASURED),
        };
        change(&mut data, &mut job);
        std::fs::write(&path, &data).unwrap();
        let transcript = Transcript {
            jobs: vec![job],
            ..Default::default()
        };
        let images = [ClosedImage { name: "mmio", path }];
        assemble(transcript, &images).unwrap().transports.remove(0)
    }

    #[test]
    fn a_job_with_the_right_bytes_is_verified() {
        let report = report(|_, _| ());
        let text = serde_json::to_string(&DemoReport {
            transports: vec![report],
        })
        .unwrap();
        assert_eq!(
            text,
            r#"{"transports":[{"transport":"mmio","requests":9,"doorbells":3,"exits":5,"interrupts":2,"#
                .to_owned()
                + r#""flushes":4,"syncs":1,"bytes":8192,"verified":true,"time_us":1500}]}"#
        );
    }

    #[test]
    fn a_failed_job_names_its_problem() {
        let reason = |change: fn(&mut Vec<u8>, &mut TransportJob)| {
            let report = DemoReport {
                transports: vec![report(change)],
            };
            assert!(!report.transports[0].verified && report.to_string().contains(" NO"));
            report.failure().unwrap()
        };
        let text = reason(|data, _| data[5000] ^= 1);
        assert_eq!(
            text,
            "mmio: the image does not hold what the guest read last"
        );
        let text = reason(|_, job| job.outcome = Err("block 1: wrong".to_owned()));
        assert_eq!(text, "mmio: block 1: wrong");
        let text = reason(|_, job| {
            job.measured = Some(Measurement {
                requests: 8,
                ..MEASURED
            })
        });
        assert_eq!(
            text,
            "mmio: the guest completed 9 requests, the device took 8"
        );
        let text = reason(|_, job| job.measured = None);
        assert_eq!(text, "mmio: the guest ended a job that it did not begin");
        let text = reason(|_, job| job.transport = "other".to_owned());
        assert_eq!(text, "mmio: the guest did not report");
    }
}
