//! The results of the conformance cases, as text or JSON.

use std::fmt;

use serde::Serialize;

use super::listener::{Case, Transcript};

/// The result of one case on one transport.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CaseReport {
    /// `mmio` or `pci`.
    pub transport: String,
    /// The name of the case.
    pub case: String,
    /// Whether the device did what the specification requires.
    pub passed: bool,
    /// The wrong behaviour, with the value that was found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// The results of all cases.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ConformanceReport {
    /// The cases, in the order in which the guest ran them.
    pub cases: Vec<CaseReport>,
    /// Number of cases that passed.
    pub passed: usize,
    /// Number of cases that failed.
    pub failed: usize,
}

impl ConformanceReport {
    /// Makes the report from the guest's transcript. A transport whose cases did not all run has
    /// failed.
    pub(super) fn new(transcript: Transcript, transports: &[&str]) -> Self {
        let mut cases: Vec<CaseReport> = Vec::new();
        let report = |case: Case| CaseReport {
            passed: case.problem.is_none(),
            transport: case.transport,
            case: case.name,
            problem: case.problem,
        };
        cases.extend(transcript.cases.into_iter().map(report));
        for &transport in transports {
            let tried = cases.iter().filter(|case| case.transport == transport);
            let tried = tried.count();
            let checked = transcript
                .checked
                .iter()
                .find(|(checked, _)| checked == transport);
            let why = transcript
                .jobs
                .iter()
                .find(|job| job.transport == transport)
                .and_then(|job| job.outcome.as_ref().err());
            let problem = match (checked, why) {
                (Some(&(_, count)), _) if count as usize == tried && tried > 0 => continue,
                (Some(&(_, count)), _) => format!("{count} cases were tried, {tried} reported"),
                (None, Some(why)) => why.clone(),
                (None, None) => "the guest did not finish".to_owned(),
            };
            cases.push(CaseReport {
                transport: transport.to_owned(),
                case: "every-case-is-tried".to_owned(),
                passed: false,
                problem: Some(problem),
            });
        }
        let passed = cases.iter().filter(|case| case.passed).count();
        let failed = cases.len() - passed;
        Self {
            cases,
            passed,
            failed,
        }
    }

    /// The problem of the first case that failed.
    pub fn failure(&self) -> Option<String> {
        let first = self.cases.iter().find(|case| !case.passed)?;
        let problem = first.problem.as_deref().unwrap_or_default();
        let (transport, case) = (&first.transport, &first.case);
        let others = match self.failed - 1 {
            0 => String::new(),
            others => format!(" (and {others} more)"),
        };
        Some(format!("{transport}: {case}: {problem}{others}"))
    }
}

impl fmt::Display for ConformanceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for case in &self.cases {
            let verdict = if case.passed { "ok" } else { "FAILED" };
            write!(f, "{:<4}  {verdict:<6}  {}", case.transport, case.case)?;
            match &case.problem {
                Some(problem) => writeln!(f, ": {problem}")?,
                None => writeln!(f)?,
            }
        }
        let (passed, failed) = (self.passed, self.failed);
        writeln!(f, "\n{passed} cases passed, {failed} failed")
    }
}

#[cfg(test)]
mod tests {
    use super::super::listener::TransportJob;
    use super::*;

    fn case(transport: &str, problem: Option<&str>) -> Case {
        Case {
            transport: transport.to_owned(),
            name: "flush".to_owned(),
            problem: problem.map(str::to_owned),
        }
    }

    #[test]
    fn a_case_that_fails_is_named() {
        let transcript = Transcript {
            cases: vec![case("mmio", None), case("pci", Some("status (0x1)"))],
            checked: vec![("mmio".to_owned(), 1), ("pci".to_owned(), 1)],
            ..Transcript::default()
        };
        let report = ConformanceReport::new(transcript, &["mmio", "pci"]);
        assert_eq!((report.passed, report.failed), (1, 1));
        assert_eq!(report.failure().unwrap(), "pci: flush: status (0x1)");
        let text = report.to_string();
        assert!(text.contains("mmio  ok      flush\n"), "{text}");
        assert!(
            text.contains("pci   FAILED  flush: status (0x1)\n"),
            "{text}"
        );
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["cases"][0]["passed"], true);
        assert_eq!(json["cases"][1]["problem"], "status (0x1)");
        assert_eq!((&json["passed"], &json["failed"]), (&1.into(), &1.into()));
    }

    #[test]
    fn a_transport_whose_cases_did_not_all_run_has_failed() {
        let report = |transcript| ConformanceReport::new(transcript, &["mmio"]).failure();
        let cases = || vec![case("mmio", None)];
        let ends = |count| Transcript {
            cases: cases(),
            checked: vec![("mmio".to_owned(), count)],
            ..Transcript::default()
        };
        assert_eq!(report(ends(1)), None);
        assert!(
            report(ends(2))
                .unwrap()
                .contains("2 cases were tried, 1 reported")
        );
        let silent = Transcript {
            cases: cases(),
            ..Transcript::default()
        };
        assert!(report(silent).unwrap().contains("did not finish"));
        let refused = Transcript {
            jobs: vec![TransportJob {
                transport: "mmio".to_owned(),
                outcome: Err("no virtio block device found".to_owned()),
                measured: None,
            }],
            ..Transcript::default()
        };
        assert!(report(refused).unwrap().contains("no virtio block device"));
    }
}
