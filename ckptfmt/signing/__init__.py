"""Sign checkpoints, and accept only checkpoints of trusted signers.

Keys and certificates need the package ``cryptography``; identities of Sigstore need ``sigstore``.

Spec: ``spec/companions/79-signatures.md``.
"""
