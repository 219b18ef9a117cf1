"""Mutants of signatures: which checkpoints a verifier accepts, and when a signer signs."""

from __future__ import annotations

from typing import Any

from ckptfmt.commit import decision
from ckptfmt.documents import signature
from ckptfmt.run import lineage, mirror
from ckptfmt.signing import bundles, keys, pin, trust
from tests.mutants.mutant import Mutant, replaced, rewritten


def _accept(_right: Any, *_: Any) -> None:
    return None


MUTANTS = {
    "one_name_for_all_signers": Mutant(
        clauses=("REQ-SIG-001",),
        fault="gives the bundles of all signers one name",
        patch=replaced(bundles, "bundle_path", lambda right, attempt, _: right(attempt, "0" * 16)),
        tests=("signing/test_signing.py::test_the_signature_of_another_key_is_none",),
    ),
    "any_statement": Mutant(
        clauses=("REQ-SIG-002",),
        fault="accepts a signature of any statement by a trusted signer",
        patch=replaced(trust, "check_statement", _accept),
        tests=(
            "signing/test_signing.py::test_a_signature_belongs_to_one_manifest",
            "signing/test_forgeries.py::test_no_forgery_is_accepted[False]",
        ),
    ),
    "first_resource_counts": Mutant(
        clauses=("REQ-SIG-002",),
        fault="compares no digest if the statement doesn't name the manifest",
        patch=rewritten(
            signature.check_statement,
            "if len(found) != 1 or found[0][1] not in _DIGESTS:",
            "if not found:\n        return\n    if found[0][1] not in _DIGESTS:",
        ),
        tests=("signing/test_forgeries.py::test_a_statement_without_the_manifest_says_nothing",),
    ),
    "signed_behind_the_commit": Mutant(
        clauses=("REQ-SIG-003",),
        fault="signs after the manifest is there",
        patch=rewritten(
            decision.finalize,
            """
            if signer is not None:
                signer.sign(store, decided, content)
            _decide_anew(store, content) if replace else _decide(store, content)
            """,
            """
            _decide_anew(store, content) if replace else _decide(store, content)
    if signer is not None:
        signer.sign(store, decided, content)
            """,
        ),
        tests=("signing/test_signing.py::test_no_kill_leaves_a_committed_save_unsigned",),
    ),
    "any_signature": Mutant(
        clauses=("REQ-SIG-004",),
        fault="doesn't verify the signature itself",
        patch=replaced(trust, "verify_by_key", _accept),
        tests=(
            "signing/test_signing.py::test_the_signature_of_another_key_is_none",
            "signing/test_forgeries.py::test_no_forgery_is_accepted[False]",
        ),
    ),
    "reads_every_bundle": Mutant(
        clauses=("REQ-SIG-004",),
        fault="reads as many bundles as there are",
        patch=rewritten(trust.Trust._find_signature, "[:BUNDLES]", ""),
        tests=("signing/test_signing.py::test_a_flood_of_bundles_is_bounded",),
    ),
    "any_root": Mutant(
        clauses=("REQ-SIG-005",),
        fault="takes the key of any certificate",
        patch=rewritten(
            keys.verify_by_root, "policy.build_client_verifier().verify(signing, between)", "pass"
        ),
        tests=(
            "signing/test_signing.py::test_a_certificate_below_a_root_signs",
            "signing/test_forgeries.py::test_no_forgery_is_accepted[True]",
        ),
    ),
    "any_usage": Mutant(
        clauses=("REQ-SIG-005",),
        fault="takes certificates that aren't for signatures",
        patch=replaced(keys, "_check_usage", _accept),
        tests=("signing/test_signing.py::test_a_certificate_has_to_allow_signatures",),
    ),
    "verified_by_the_clock": Mutant(
        clauses=("REQ-SIG-005",),
        fault="refuses a certificate that has expired",
        patch=rewritten(keys.verify_by_root, ".time(signing.not_valid_before_utc)", ""),
        tests=("signing/test_signing.py::test_a_certificate_below_a_root_signs",),
    ),
    "no_memory": Mutant(
        clauses=("REQ-SIG-006",),
        fault="accepts what is older than the pin",
        patch=rewritten(
            pin.compare_with_pin, "elif pinned.digest != manifest.digest:", "elif False:"
        ),
        tests=(
            "signing/test_signing.py::test_a_rollback_is_refused",
            "signing/test_signing.py::test_a_pin_follows_one_run",
        ),
    ),
    "steps_alone": Mutant(
        clauses=("REQ-SIG-006",),
        fault="compares steps without launches",
        patch=rewritten(
            pin._is_newer,
            "(found.launch, found.step) > (pinned.launch, pinned.step)",
            "found.step > pinned.step",
        ),
        tests=("signing/test_signing.py::test_going_back_on_purpose_is_no_rollback",),
    ),
    "launches_not_recorded": Mutant(
        clauses=("REQ-SIG-006",),
        fault="records no launch that goes back",
        patch=replaced(lineage, "record_launch", _accept),
        tests=("signing/test_signing.py::test_going_back_on_purpose_is_no_rollback",),
    ),
    "mirror_without_bundles": Mutant(
        clauses=("REQ-SIG-007",),
        fault="copies no bundles to a mirror",
        patch=replaced(mirror, "copy_bundles", _accept),
        tests=("signing/test_signing.py::test_a_mirror_and_what_goes_on_from_it_stay_signed",),
    ),
    "unsigned_is_passed_over": Mutant(
        clauses=("REQ-SIG-008",),
        fault="goes on from an older checkpoint if the newest isn't signed",
        patch=rewritten(
            lineage._open_valid,
            "require_signature.check(store.at(entry.name), entry.manifest, may_be_older=by_hand)",
            """
            try:
            require_signature.check(store.at(entry.name), entry.manifest, may_be_older=by_hand)
        except CkptError as error:
            return error
            """,
        ),
        tests=(
            "signing/test_signing.py::test_no_older_checkpoint_takes_the_place_of_an_unsigned_one",
        ),
    ),
    "bundles_of_other_attempts": Mutant(
        clauses=("REQ-SIG-001",),
        fault="names bundles without the attempt, so that no clean-up finds them",
        patch=rewritten(
            signature.bundle_prefix,
            "return f'signature-{attempt}-'",
            "return 'signature-0000000000000000-'",
        ),
        tests=("signing/test_signing.py::test_a_save_that_replaces_leaves_one_signature",),
    ),
}
